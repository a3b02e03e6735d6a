#!/usr/bin/env bash
# Runs the kernels on the CPU (kernels/shim): each kernels/shim/test_X.cpp plain with seeds 1 to 3, then under ASan and
# UBSan, then once per planted fault (#ifdef PLANT_... in kernels/*.cu, *.cuh), which must be caught. `test_kernels.sh
# linear sample` runs those only. Needs g++ and the headers of the CUDA toolchain (scripts/cuda-toolchain.sh). Results
# are kept by content: what passed is not run again unless a source changed.
set -euo pipefail
cd "$(dirname "$0")/.."
include=${CUDA_TOOLCHAIN_DIR:-$PWD/.cuda-toolchain}/include
[ -f "$include/cuda_bf16.h" ] || include=${CUDA_HOME:-/usr/local/cuda}/include
if ! [ -f "$include/cuda_bf16.h" ]; then
  echo "error: cuda_bf16.h not found: run scripts/cuda-toolchain.sh or set CUDA_HOME" >&2
  exit 3
fi
out=${CARGO_TARGET_DIR:-target}/shim; mkdir -p "$out"
flags="-std=c++17 -fno-strict-aliasing -ffp-contract=off -DCPU_SHIM -Wall -Wextra -Wno-unknown-pragmas -Wno-attributes"
flags+=" -Wno-unused-parameter -Wno-missing-field-initializers -isystem $include -Ikernels"
names=("$@"); [ $# -gt 0 ] || names=($(ls kernels/shim/test_*.cpp | sed 's/.*test_\(.*\)\.cpp/\1/'))
failed=0
report() { echo "$1"; [[ $1 == FAILED* ]] && failed=1; return 0; }
run() { # what, program, variables...: a line of its result, or the end of what it said
  local what=$1 program=$2; shift 2
  if env "$@" "$program" > "$out/$name.log" 2>&1; then report "ok     $what: $(tail -1 "$out/$name.log")"
  else tail -200 "$out/$name.log"; report "FAILED $what"; fi
}
for name in "${names[@]}"; do
  src=kernels/shim/test_$name.cpp
  used=$(g++ $flags -MM "$src" | tr -d '\\\n' | cut -d: -f2-)
  key=$(cat scripts/test_kernels.sh $used | sha256sum | cut -c1-16)
  stamp=$out/$name.$key.ok
  if [ -f "$stamp" ]; then echo "ok     $name (unchanged since it last passed)"; continue; fi
  was=$failed; failed=0
  g++ $flags -O2 "$src" -o "$out/$name" &
  g++ $flags -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined "$src" -o "$out/$name.san" &
  wait %1; wait %2
  for seed in 1 2 3; do run "$name, seed $seed" "$out/$name" CPU_SHIM_SEED=$seed; done
  run "$name, sanitised" "$out/$name.san" CPU_SHIM_SEED=4 SHIM_QUICK=1
  for plant in $(grep -ho 'PLANT_[A-Z_]*' $(tr ' ' '\n' <<< "$used" | grep '\.cuh\?$') | sort -u); do
    g++ $flags -O2 -D$plant "$src" -o "$out/$name.planted"
    if CPU_SHIM_SEED=1 "$out/$name.planted" > "$out/$name.log" 2>&1; then
      report "FAILED $name: the planted fault $plant was not caught"
    else
      report "ok     $name: $plant is caught"
    fi
  done
  [ $failed = 0 ] && touch "$stamp"
  [ $was = 0 ] || failed=1
done
exit $failed
