#!/usr/bin/env bash
# Builds libvolley_shim.so, all kernels compiled for the CPU, into target/shim; `shim.sh sanitised` builds
# libvolley_shim_san.so with ASan and UBSan. Prints the path of the library. Only what changed is compiled again.
set -euo pipefail
cd "$(dirname "$0")/.."
include=${CUDA_TOOLCHAIN_DIR:-$PWD/.cuda-toolchain}/include
[ -f "$include/cuda_bf16.h" ] || include=${CUDA_HOME:-/usr/local/cuda}/include
if ! [ -f "$include/cuda_bf16.h" ]; then
  echo "error: cuda_bf16.h not found: run scripts/cuda-toolchain.sh or set CUDA_HOME" >&2
  exit 3
fi
out=${CARGO_TARGET_DIR:-target}/shim; kind=plain; more="-O2"; lib=$out/libvolley_shim.so
if [ "${1:-}" = sanitised ]; then
  kind=san; more="-O1 -g -fsanitize=address,undefined"; lib=$out/libvolley_shim_san.so
fi
flags="-std=c++17 -fPIC -fvisibility=hidden -fno-strict-aliasing -ffp-contract=off -DCPU_SHIM"
flags+=" -Wno-unknown-pragmas -Wno-attributes -isystem $include -Ikernels $more"
mkdir -p "$out/$kind"
build() {  # source, object: skipped when newer than all it includes
  if [ -f "$2" ] && [ -f "$2.d" ]; then
    local fresh=1 f
    for f in $(tr -d '\\\n' < "$2.d" | cut -d: -f2-); do [ -e "$f" ] && [ ! "$f" -nt "$2" ] || { fresh=0; break; }; done
    [ $fresh = 1 ] && return 0
  fi
  g++ $flags -x c++ -c "$1" -MMD -MF "$2.d" -o "$2"
}
export -f build; export flags
sources=(kernels/*.cu kernels/shim/shim.cpp)
objects=("${sources[@]##*/}")
objects=("${objects[@]/%/.o}")  # not all that lie there: a source may be gone
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} bash -c 'build {} '"$out/$kind"'/$(basename {}).o'
g++ -shared $more -Wl,-Bsymbolic "${objects[@]/#/$out/$kind/}" -o "$lib"
echo "$lib"
