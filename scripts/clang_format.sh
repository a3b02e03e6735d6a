#!/usr/bin/env bash
# The kernels' sources against .clang-format; `clang_format.sh --fix` rewrites what differs. Needs python3 with pip; the
# program is a wheel of 2 MB from PyPI, kept in $CLANG_FORMAT_DIR (.cache/clang-format). Where it cannot be had: a line
# that begins with `skipped:`.
set -euo pipefail
cd "$(dirname "$0")/.."
version=23.1.5 sha256=d97ce49911ba8c89ef3f3c0735a9c7818e4780ab4812c67d1c5fcd829d16ae52
dir=${CLANG_FORMAT_DIR:-$PWD/.cache/clang-format}/$version
if ! [ -x "$dir/bin/clang-format" ]; then
  rm -rf "$dir"
  if ! reason=$(python3 -m pip install --quiet --no-deps --only-binary=:all: --require-hashes --target "$dir" \
    -r <(echo "clang-format==$version --hash=sha256:$sha256") 2>&1); then
    rm -rf "$dir"
    echo "skipped: clang-format $version cannot be installed: $(echo "$reason" | grep -v '^$' | tail -1)"
    exit 0
  fi
fi
mode=(--dry-run --Werror)
[ "${1:-}" = --fix ] && mode=(-i)
find kernels -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp' | sort |
  xargs "$dir/bin/clang-format" "${mode[@]}"
