"""slim_nccl.py IN OUT [SM]: a copy of libnccl.so.2 whose machine code for other GPUs than compute capability SM (90 for 9.0, the default) is zeroed, so that it compresses to an
eighth: a library for one kind of GPU that travels to a machine without a network (scripts/gpu_check.sh takes it from carry/nccl/*.xz).

A library has fat binaries in two sections: each a header (magic 0xBA55ED50, header bytes, bytes) and entries (kind, header bytes, bytes; at 28 the compute capability).
"""
import mmap
import shutil
import struct
import sys

source, target = sys.argv[1:3]
keep = int(sys.argv[3]) if len(sys.argv) > 3 else 90
shutil.copy(source, target)
with open(target, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
    (sections_at,) = struct.unpack_from("<Q", data, 0x28)
    section_bytes, n_sections, names = struct.unpack_from("<HHH", data, 0x3A)
    section = lambda i: struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * section_bytes)
    names_at = section(names)[4]
    kept = cut = 0
    for i in range(n_sections):
        name_at, (at, size) = names_at + section(i)[0], section(i)[4:6]
        if data[name_at : data.find(b"\0", name_at)] not in (b".nv_fatbin", b"__nv_relfatbin"):
            continue
        end = at + size
        while at < end:
            magic, _, header, n_bytes = struct.unpack_from("<IHHQ", data, at)
            if magic != 0xBA55ED50:
                at += 8
                continue
            entry, at = at + header, at + header + n_bytes
            while entry < at:
                header, n_bytes = struct.unpack_from("<IQ", data, entry + 4)
                (sm,) = struct.unpack_from("<I", data, entry + 28)
                if sm == keep:
                    kept += n_bytes
                else:
                    cut += n_bytes
                    data[entry + header : entry + header + n_bytes] = bytes(n_bytes)
                entry += header + n_bytes
    print(f"{kept} bytes of code for {keep // 10}.{keep % 10} kept, {cut} of other code zeroed")
    sys.exit(0 if kept else f"error: {source} has no code for {keep // 10}.{keep % 10}")
