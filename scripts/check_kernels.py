#!/usr/bin/env python3
"""Compiles kernels/*.cu for each target and refuses what would cost time on the GPU: spills or a stack frame, and blocks so large that two
consecutive kernels do not fit on one SM together (then a successor cannot load its weights ahead). `check_kernels.py linear sample` checks those files
only; -v prints every kernel. Needs nvcc (scripts/cuda-toolchain.sh or $NVCC)."""
import os, pathlib, re, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Target: threads and bytes of shared memory of an SM (registers: 65,536 on both). 1 KB a block is taken by the system.
CHIPS = {"90a": (2048, 228 << 10), "120a": (1536, 100 << 10)}
MAX_THREADS, MAX_SHARED = 768, 48 << 10
# Dynamic shared memory by name of kernel, which cubins do not know: what the host passes at most.
DYNAMIC = {r"linear_prefill_.*": 98304}
# Kernels that may be larger than half an SM, and why.
EXEMPT = {
    r"linear_prefill_.*": "prefill kernels run long enough to hide the start of the next; their tiles need the registers",
    r"attention_prefill_.*": "as linear_prefill",
}


def nvcc():
    toolchain = pathlib.Path(os.environ.get("CUDA_TOOLCHAIN_DIR", ROOT / ".cuda-toolchain"))
    for p in [os.environ.get("NVCC"), os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc"), toolchain / "bin/nvcc"]:
        if p and os.path.exists(p):
            return pathlib.Path(p).resolve()
    sys.exit("error: no nvcc found: set NVCC or CUDA_HOME, or run scripts/cuda-toolchain.sh")


def compile(source, arch, compiler, folder):
    """[(kernel, registers, threads, static shared bytes, stack and spill bytes)] of one file."""
    ptx = pathlib.Path(folder) / f"{source.stem}.{arch}.ptx"
    for command in ([compiler, "-ptx", "-O3", "-std=c++17", f"-arch=compute_{arch}", source, "-o", ptx],
                    [compiler.parent / "ptxas", "-O3", "-v", f"-arch=sm_{arch}", ptx, "-o", ptx.with_suffix(".cubin")]):
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {source.name} for sm_{arch}:\n{done.stderr}")
    threads = dict(re.findall(r"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+)", ptx.read_text()))
    rows = []
    for part in done.stderr.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        number = lambda pattern: sum(map(int, re.findall(pattern, part)))
        rows.append((name, number(r"Used (\d+) registers"), int(threads.get(name, 0)), number(r"(\d+) bytes smem"), number(r"(\d+) bytes (?:stack frame|spill stores|spill loads)")))
    return rows


def lookup(table, name):
    return next((v for k, v in table.items() if re.fullmatch(k, name)), None)


def main():
    arguments = [a for a in sys.argv[1:] if a != "-v"]
    sources = [ROOT / "kernels" / f"{a}.cu" for a in arguments] or sorted((ROOT / "kernels").glob("*.cu"))
    compiler, faults, count, used = nvcc(), [], 0, set()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        jobs = [(s, a, pool.submit(compile, s, a, compiler, folder)) for s in sources for a in CHIPS]
        for source, arch, job in jobs:
            for name, registers, threads, static, spill in job.result():
                count += 1
                shared, (sm_threads, sm_shared) = static + (lookup(DYNAMIC, name) or 0), CHIPS[arch]
                held = ((registers + 7) // 8 * 8) * ((threads + 31) // 32 * 32)
                say = lambda what: faults.append(f"{source.name}: {name} for sm_{arch}: {what}")
                if "-v" in sys.argv:
                    print(f"{name:40} sm_{arch:5} {registers:4} registers x {threads:4} threads {shared:6} bytes shared")
                if spill:
                    say(f"{spill} bytes of stack frame and spills; expected none")
                if not threads:
                    say("no launch bound")
                if lookup(EXEMPT, name):
                    used.add(lookup(EXEMPT, name))
                    continue
                if threads > MAX_THREADS or shared > MAX_SHARED:
                    say(f"{threads} threads and {shared} bytes of shared memory a block; at most {MAX_THREADS} and {MAX_SHARED}")
                if 2 * held > 65536 or 2 * threads > sm_threads or 2 * (shared + 1024) > sm_shared:
                    say(f"takes more than half an SM ({held} of 65536 registers, {threads} of {sm_threads} threads, {shared} of {sm_shared} bytes)")
    print("\n".join(faults), end="\n" if faults else "")
    print(f"{count} kernels (each counted per target) checked, {len(faults)} faults; exempt from the half-SM rule: {'; '.join(sorted(used)) or 'none'}")
    sys.exit(bool(faults))


main()
