#!/usr/bin/env bash
# From a fresh clone to an answer: fetches SmolLM2 and the CUDA compiler (both once), builds the release binary, runs `volley run` with the arguments
# given here. stdout carries the answer and nothing else. Needs rustup's cargo, g++, and Python 3.9 or newer with pip.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
{
  cd "$repository"
  python3 scripts/fetch_smollm2.py
  scripts/cuda-toolchain.sh || echo "note: no CUDA compiler, so this build has no GPU kernels and runs on the CPU"
  cargo build --release
} >&2 </dev/null
export VOLLEY_MODEL=${VOLLEY_MODEL:-$repository/models/smollm2-135m-instruct}
exec "${CARGO_TARGET_DIR:-$repository/target}/release/volley" run "$@" </dev/null
