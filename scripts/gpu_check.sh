#!/usr/bin/env bash
# Everything that only a GPU can show, in under ten minutes, with one short table at the end: doctor, tests/gpu.rs, tests/comm.rs, latencies, compute-sanitizer, time from
# exec to the first token, speculation, load from disk, Ctrl-C at any moment, soaks, NCCL, 20 equal runs, a long conversation, rest. ONLY=plots measures what
# scripts/plot_bench.py draws, nothing else does. Builds nothing and needs no cargo, so that the binaries may come from another machine:
#   scripts/gpu_check.sh VOLLEY GPU_TEST COMM_TEST          (target/release/volley, target/release/deps/gpu-..., target/release/deps/comm-...)
# VOLLEY_MODEL=DIR is SmolLM2 (scripts/fetch_smollm2.py); without it what needs it is skipped. Logs go to $OUT, else target/gpu_check. ONLY=tests,bench runs some stages.
# NCCL is the system's or PyTorch's; carry/nccl/*.xz*, if it is there, holds one of 2.30 or later, whole or in pieces (scripts/slim_nccl.py made it small). SOAK=N replays in each soak instead of 50,000.
# Exit code 0: nothing failed.
set -u
[ $# = 3 ] || { echo "usage: scripts/gpu_check.sh VOLLEY GPU_TEST COMM_TEST" >&2; exit 2; }
cd "$(dirname "$0")/.."
volley=$(realpath "$1") || exit 2
tests=$(realpath "$2") || exit 2
comm=$(realpath "$3") || exit 2
model=${VOLLEY_MODEL:-}; unset VOLLEY_MODEL
logs=${OUT:-target/gpu_check}; mkdir -p "$logs"
deadline=$((SECONDS + 580)); table=; failed=0
now_ms() { echo $(($(date +%s%N) / 1000000)); }
wanted() { [ -z "${ONLY:-}" ] || [[ ,$ONLY, == *,$1,* ]]; }
used_mb() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -1; }

row() { # stage, verdict, note
  table+=$(printf '%-22s %-8s %s' "$1" "$2" "$3")$'\n'
  [ "$2" != FAILED ] || failed=1
  printf '== %s: %s %s\n' "$1" "$2" "$3"
}

run() { # stage, most seconds, command...: its output in the log, its exit code in $code, its seconds in $took
  local name=$1 most=$2 start=$SECONDS left=$((deadline - SECONDS)); shift 2
  [ $left -lt $most ] && most=$left
  if [ $most -lt 1 ]; then code=124; took=0; return; fi
  timeout -k 5 $most "$@" >"$logs/$name.log" 2>&1; code=$?
  took=$((SECONDS - start))
}

verdict() { # stage, note: ok when the last command's exit code was 0
  case $code in
    0) row "$1" ok "$2 ($took s)" ;;
    124) row "$1" FAILED "out of time after $took s; $2" ;;
    *) row "$1" FAILED "exit code $code; $(grep -m1 -iE 'error|FAIL|panicked' "$logs/$1.log" | cut -c1-160)" ;;
  esac
}

number() { grep -o "\"$2\":\({\"p50\":\)\?[0-9.eE-]*" <<< "$1" | head -1 | sed 's/.*://'; } # JSON line, key: its number, or the p50 in it

bench() { # stage, most seconds, arguments...: medians by depth, and widths against width 1
  local name=$1 most=$2; shift 2
  run "$name" "$most" "$volley" bench --device cuda --json "$@"
  local note= line
  while read -r line; do
    case $line in
      *'"token_ms"'*) note+="d$(number "$line" depth): $(printf '%.3f ms, %.0f %% of %.0f GB/s; ' "$(number "$line" token_ms)" "$(number "$line" share_of_read_rate | awk '{print 100 * $1}')" "$(number "$line" read_rate_gb_s)")" ;;
      *'"against_width_1"'*) note+="w$(number "$line" width) x$(printf %.3f "$(number "$line" against_width_1)"); " ;;
    esac
  done < <(grep -a '^{' "$logs/$name.log")
  verdict "$name" "$note"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,memory.used --format=csv,noheader
"$volley" --version

if wanted doctor; then
  run doctor 90 "$volley" doctor ${model:+-m "$model"}
  verdict doctor "$(tail -1 "$logs/doctor.log")"; cat "$logs/doctor.log"
fi
if wanted tests; then
  run tests 260 env ${model:+VOLLEY_MODEL="$model"} "$tests" --test-threads 1 --nocapture
  skipped=$(grep -c 'skipped: ' "$logs/tests.log")
  grep -q 'skipped: no GPU' "$logs/tests.log" && code=1
  verdict tests "$(grep -o 'test result: [^;]*; [^;]*;' "$logs/tests.log") $skipped skipped"; grep -aE '^test |panicked|^(SmolLM2|8B|llama|qwen)' -A1 "$logs/tests.log" | cut -c1-220
fi
if wanted comm; then
  run comm 100 env VOLLEY_GPUS="${VOLLEY_GPUS:-1}" "$comm" --test-threads 1 --nocapture
  verdict comm "$(grep -o 'test result: [^;]*; [^;]*;' "$logs/comm.log")"; grep -aE '^test |panicked' -A1 "$logs/comm.log" | cut -c1-220
fi
if wanted nccl; then
  system=$(ldconfig -p | grep -o '/[^ ]*libnccl.so.2$' | head -1)
  [ -n "$system" ] || system=$(find /opt /usr/local/lib -name libnccl.so.2 2>/dev/null | head -1)
  shared=
  if ls carry/nccl/*.xz* >/dev/null 2>&1; then
    shared=${TMPDIR:-/tmp}/volley-nccl/libnccl.so.2; mkdir -p "$(dirname "$shared")"
    cat carry/nccl/*.xz* | python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.stdin.buffer), open(sys.argv[1], "wb"))' "$shared"
  fi
  run nccl 250 env VOLLEY_GPUS=1 ${system:+VOLLEY_NCCL="$system"} ${shared:+VOLLEY_NCCL_SHARED="$shared"} "$comm" --exact nccl_works_in_graphs_or_refuses --nocapture
  verdict nccl "$system, $shared; $(grep -c 'skipped: ' "$logs/nccl.log") skipped"; grep -aE '^[0-9] ranks|skipped|panicked' -A1 "$logs/nccl.log" | cut -c1-300
fi
if wanted soak; then
  run soak 200 env VOLLEY_SOAK="${SOAK:-50000}" "$tests" --exact ranks_soak --nocapture
  verdict soak "$(grep -aoE '[0-9]+ ranks, [0-9]+ replays in [0-9.]+ s' "$logs/soak.log" | tr '\n' ';')"; grep -aE '^[0-9]+ ranks|panicked' -A1 "$logs/soak.log"
  run soak_sums 100 env VOLLEY_GPUS="${VOLLEY_GPUS:-1}" VOLLEY_SOAK="${SOAK:-50000}" "$comm" --exact sums_soak --nocapture
  verdict soak_sums "$(grep -aoE '[0-9]+ ranks: [0-9]+ replays of sums in [0-9.]+ s' "$logs/soak_sums.log" | tr '\n' ';')"; grep -a panicked -A1 "$logs/soak_sums.log"
fi
if wanted bench; then
  [ -z "$model" ] || bench bench_smollm2 30 -m "$model" -p 128 -g 256 -d 0 --widths 1,4,8
  bench bench_1b 40 --random -m tests/shapes/llama-3.2-1b -p 128 -g 128 -d 0,4096 -r 3 --widths 1,4,8
  bench bench_8b 60 --random -m tests/shapes/llama-3.1-8b -p 512 -g 64 -d 0,4096 -r 3 --widths 1,4,8
fi
if wanted speculation && [ -n "$model" ]; then
  # Accept length with 6 drafts, and plain against speculative decoding with the number of drafts left to the engine.
  for file in mt_bench humaneval gsm8k_100; do
    run "six_$file" 60 "$volley" bench -m "$model" --draft models/smollm2-135m-instruct-eagle3 --draft-tokens 6 --prompts prompts/$file.jsonl --limit 20 -g 200
    run "spec_$file" 60 "$volley" bench -m "$model" --draft models/smollm2-135m-instruct-eagle3 --prompts prompts/$file.jsonl --limit 20 -g 200
    verdict "spec_$file" "6 drafts: $(grep -a "^$file" "$logs/six_$file.log" | cut -c30-110); chosen: $(grep -a "^$file" "$logs/spec_$file.log" | cut -c23-100)"
  done
  run cycle 40 "$volley" bench --random -m tests/shapes/llama-3.1-8b --draft tests/shapes/llama-3.1-8b-eagle3 -c 8192 --cycle
  verdict cycle "8B with a drafter of its shape: break-even $(grep -a break-even "$logs/cycle.log" | sed 's/.*: //')"; cat "$logs/cycle.log"
fi
if wanted load; then
  # 16 GB from this machine's disk: cold where the page cache can be dropped, then warm.
  big=${TMPDIR:-/tmp}/volley-load; run load_write 200 python3 scripts/make_random_checkpoint.py tests/shapes/llama-3.1-8b "$big"
  if [ $code = 0 ]; then
    sync; dropped=no; echo 3 2>/dev/null >/proc/sys/vm/drop_caches && dropped=yes
    start=$(now_ms); dd if="$big/model-00001-of-00004.safetensors" of=/dev/null bs=16M iflag=direct 2>"$logs/load_disk.log"; disk=$(awk -v b="$(stat -c %s "$big/model-00001-of-00004.safetensors")" -v ms=$(($(now_ms) - start)) 'BEGIN { printf "%.2f", b / ms / 1e6 }')
    for state in cold warm warm; do
      run "load_$state" 90 "$volley" bench -v -m "$big" --draft none -c 1024 -p 16 -g 2 -r 1 --device cuda
      rates+=" $state $(grep -ao 'weights in [0-9]* ms' "$logs/load_$state.log" | awk '{ printf "%.2f", 16060.5 / $3 }')"
    done
    # O05: with plain reads the host holds pieces, not shards. VmHWM also counts the driver and pages that are mapped.
    "$volley" bench -m "$big" --draft none --no-mmap -c 1024 -p 16 -g 2 -r 1 --device cuda >"$logs/load_host.log" 2>&1 & pid=$!
    host=0; while kb=$(awk '/VmHWM/ { print $2 }' /proc/$pid/status 2>/dev/null) && [ -n "$kb" ]; do host=$kb; sleep 0.05; done
    wait $pid || code=$?
    shard=$(stat -c %s "$big/model-00001-of-00004.safetensors")
    [ $((host * 1024)) -lt $((2 * shard)) ] || { code=1; echo "error: $host KB of host memory, two shards have $((2 * shard)) bytes" >>"$logs/load.log"; }
    verdict load "GB/s:$rates; disk (direct reads) $disk; page cache dropped before the cold one: $dropped; host memory with --no-mmap $((host / 1024)) MiB at most"
  fi
  rm -rf "$big"
fi
if wanted sanitizer; then
  for tool in memcheck racecheck; do
    if ! command -v compute-sanitizer >/dev/null; then row $tool skipped "no compute-sanitizer"; continue; fi
    cases=few_launches; [ $tool = memcheck ] && cases="few_launches tiny_models_compute"
    run $tool 75 compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 --launch-timeout 60 "$tests" --test-threads 1 $cases
    verdict $tool "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$logs/$tool.log" | tail -1)"
  done
fi
if wanted first && [ -n "$model" ]; then
  # The page cache is warm: the stages before have read the file.
  times=
  for _ in 1 2 3 4 5; do
    start=$(now_ms); "$volley" run -m "$model" -n 1 "What is the capital of France?" </dev/null >"$logs/first.log" 2>&1; code=$?; times+="$(($(now_ms) - start)) "
    [ $code = 0 ] || break
  done
  took=0; verdict first "exec to first token and exit, ms: $times"
  "$volley" run -v -m "$model" -n 1 hi </dev/null >"$logs/start.log" 2>&1; grep -E 'graphs in|loaded' "$logs/start.log"
fi
interrupts() { # stage, arguments...: signals during start, prefill and decode alike: exit code 130 (SIGTERM 143) within 2 s, and the memory is back
  local name=$1 before worst=0 bad= during=0 case signal delay text pid start code ms expected after; shift
  before=$(used_mb)
  for case in INT:0.05 INT:0.1 INT:0.2 INT:0.3 INT:0.4 INT:0.5 INT:0.6 INT:0.8 INT:1.0 INT:1.5 INT:2.5 TERM:0.2 TERM:1.0 TERM:2.5; do
    signal=${case%:*}; delay=${case#*:}
    text=$prompt; [[ $delay == [12]* ]] && text="Count to a million."
    "$volley" run -m "$model" --ignore-eos "$@" <<< "$text" >"$logs/$name.log" 2>"$logs/$name.err" & pid=$!
    sleep "$delay"; start=$(now_ms); kill -$signal $pid 2>/dev/null; wait $pid; code=$?; ms=$(($(now_ms) - start))
    [ -s "$logs/$name.log" ] && during=$((during + 1))
    [ $ms -gt $worst ] && worst=$ms
    expected=130; [ $signal = TERM ] && expected=143
    [ $code = $expected ] || bad+=" $case gave $code"
    [ $ms -le 2000 ] || bad+=" $case took $ms ms"
    for _ in 1 2 3 4 5 6 7 8 9 10; do after=$(used_mb); [ "$after" -le $((before + 16)) ] && break; sleep 0.2; done
    [ "$after" -le $((before + 16)) ] || bad+=" $case left $((after - before)) MB"
  done
  if [ -z "$bad" ]; then row "$name" ok "14 signals, $during of them while answering, slowest exit $worst ms, memory back"; else row "$name" FAILED "$bad"; fi
}
if wanted interrupt && [ -n "$model" ]; then
  set -m   # so that background jobs do not ignore SIGINT
  prompt=$(yes "The quick brown fox jumps over the lazy dog." | head -n 600)
  interrupts interrupt
  # Three ranks on the GPU; the first start finds out how sums travel, and remembers it.
  run ranks_start 60 "$volley" run -v -m "$model" --tp 3 --ranks-per-gpu 3 -n 1 hi
  verdict ranks_start "$(grep -aE 'graphs in' "$logs/ranks_start.log")"
  interrupts interrupt_ranks --tp 3 --ranks-per-gpu 3
fi

if wanted determinism && [ -n "$model" ]; then
  # 20 runs each, sampled with one seed, with the drafter and without: one text.
  start=$SECONDS; code=0; : >"$logs/determinism.log"
  for draft in none models/smollm2-135m-instruct-eagle3 models/smollm2-135m-instruct-eagle3,ngram; do
    for _ in $(seq 20); do
      "$volley" run -m "$model" --draft $draft --device cuda -t 0.8 --top-p 0.95 --seed 7 -n 200 --ignore-eos "Tell me a story." </dev/null 2>&1 | md5sum >>"$logs/determinism.log"
    done
  done
  texts=$(sort -u "$logs/determinism.log" | wc -l); took=$((SECONDS - start))
  [ "$texts" = 1 ] || { code=1; echo "error: $texts texts of one seed" >>"$logs/determinism.log"; }
  "$volley" run -m "$model" --device cuda -t 0.8 -n 1 hi </dev/null 2>&1 >/dev/null | grep -q '^seed: [0-9]*$' || { code=1; echo "error: a drawn seed was not printed" >>"$logs/determinism.log"; }
  verdict determinism "60 runs, $texts text"
fi
if wanted long && [ -n "$model" ]; then
  # O15, O16, O24: 10,000 tokens; then rest: the power without a process, with an empty CUDA context (the driver's idle), and with a chat that waits at the prompt.
  power() { nvidia-smi --query-gpu=power.draw,utilization.gpu --format=csv,noheader,nounits | head -1; }
  sleep 5; before=$(power); memory=$(used_mb)
  for draft in none models/smollm2-135m-instruct-eagle3,ngram; do
    run "long_${draft%%/*}" 120 python3 scripts/long_chat.py "$volley" --model "$model" --device cuda --draft $draft --tokens 10000 --context 2048 --checks 15
    verdict "long_${draft%%/*}" "$(tail -1 "$logs/long_${draft%%/*}.log")"; cat "$logs/long_${draft%%/*}.log"
  done
  python3 -c 'import ctypes, time
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
time.sleep(14)' & pid=$!
  sleep 12; context=$(power); wait $pid
  mkfifo "$logs/rest.fifo" 2>/dev/null; "$volley" chat -m "$model" --device cuda <"$logs/rest.fifo" >"$logs/rest.log" 2>&1 & pid=$!
  exec 9>"$logs/rest.fifo"; echo "Tell me a story." >&9; sleep 12; rest=$(power); exec 9>&-; wait $pid; code=$?; rm -f "$logs/rest.fifo"
  [ "${rest#*, }" = 0 ] || { code=1; echo "error: the GPU is ${rest#*, } % busy at rest" >>"$logs/rest.log"; }
  awk -v a="${context%,*}" -v b="${rest%,*}" 'BEGIN { exit !(b > a + 10) }' && { code=1; echo "error: $rest W at rest, $context with an empty CUDA context" >>"$logs/rest.log"; }
  took=12; verdict rest "GPU W, % busy: $before without a process, $context with an empty CUDA context, $rest with a chat that waits; memory $memory MB before, $(used_mb) MB after"
fi
if [[ ,${ONLY:-}, == *,plots,* ]]; then
  # JSON for scripts/plot_bench.py: latency by depth, cost by width.
  widths=1,2,3,4,5,6,7,8,16
  [ -z "$model" ] || bench plot_smollm2 20 -m "$model" --draft none -p 64 -g 64 -r 2 -d 0,1024,4096 --widths $widths
  bench plot_1b 35 --random -m tests/shapes/llama-3.2-1b -c 20000 -p 64 -g 64 -r 2 -d 0,1024,4096,16384 --widths $widths
  bench plot_8b 45 --random -m tests/shapes/llama-3.1-8b -c 20000 -p 64 -g 48 -r 2 -d 0,1024,4096,16384 --widths $widths
fi

printf '\n%s' "$table"
[ $failed = 0 ] && echo "all of it holds, in $SECONDS s" || echo "something failed, in $SECONDS s"
exit $failed
