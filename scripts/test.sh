#!/usr/bin/env bash
# Every check of this repository in one command, without input: format, lints, licences and advisories of crates,
# kernels (compiled for both chips, run on the CPU), tests, and an answer from the binary. Ends with one line that
# counts the tests. With CI set, downloads and build products are kept in $XDG_CACHE_HOME/volley, so that fresh clones
# on one machine share them. Needs what scripts/answer.sh needs.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
if [ -n "${CI:-}" ]; then
  cache=${XDG_CACHE_HOME:-$HOME/.cache}/volley
  export CUDA_TOOLCHAIN_DIR=${CUDA_TOOLCHAIN_DIR:-$cache/cuda} CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}
  export CARGO_DENY_DIR=${CARGO_DENY_DIR:-$cache/deny} CLANG_FORMAT_DIR=${CLANG_FORMAT_DIR:-$cache/clang-format}
fi
log=$(mktemp)
stage="start"
trap 'status=$?; rm -f "$log"; [ $status = 0 ] || echo "FAILED in stage: $stage"' EXIT

run() { # name, command...
  stage=$1; shift
  local start=$SECONDS
  echo "== $stage: $*"
  "$@"
  echo "== $stage: $((SECONDS - start)) s"
}

format() {
  cargo fmt --check
  scripts/clang_format.sh 2>&1 | tee -a "$log"
}

crates() { scripts/deny.sh 2>&1 | tee -a "$log"; }

tests() { cargo test --no-fail-fast 2>&1 | tee -a "$log"; }

answer() {
  cargo build
  local answer
  answer=$("${CARGO_TARGET_DIR:-target}/debug/volley" run -m models/smollm2-135m-instruct \
    "What is the capital of France?")
  echo "$answer"
  [[ $answer == *Paris* ]]
}

run format format
run model python3 scripts/fetch_smollm2.py
run compiler scripts/cuda-toolchain.sh
run lint cargo clippy --all-targets -- -D warnings
run crates crates
run kernels python3 scripts/check_kernels.py
run shim scripts/test_kernels.sh
run answer answer
run tests tests
awk -v s="$SECONDS" '/^test result:/ { passed += $4; failed += $6; ignored += $8 } /skipped: / { skipped++ }
  END {
    printf "test result: ok. %d passed; %d failed; %d ignored; %d skipped; ", passed, failed, ignored, skipped
    printf "all stages in %d s\n", s
  }' "$log"
