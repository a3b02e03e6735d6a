#!/usr/bin/env bash
# Release files in OUT (default: dist/): an archive with the executable, LICENSE, the licences of what is inside, README, completions; and its sha256.
#   scripts/release.sh [OUT]
#   volley-VERSION-x86_64-linux.tar.gz          for glibc 2.28 and later; NCCL is opened at run time where several GPUs ask for it
#   volley-VERSION-x86_64-linux-nccl.tar.gz     NCCL linked in, for this machine's glibc and later: with NCCL_STATIC_DIR, the folder of libnccl_static.a
# Needs what scripts/answer.sh needs; zig and cargo-zigbuild come from Python packages (into .cache). Stops when an executable is not what it should be.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-dist}; mkdir -p "$out"; out=$(realpath "$out")
cache=$PWD/.cache/release; mkdir -p "$cache"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
VOLLEY_COMMIT=$(git rev-parse --short=12 HEAD 2>/dev/null || echo "no commit"); export VOLLEY_COMMIT
[ -z "$(git status --porcelain 2>/dev/null)" ] || VOLLEY_COMMIT+=" and changes"
GLIBC=2.28

scripts/cuda-toolchain.sh
scripts/deny.sh
python3 scripts/licences.py "$cache/LICENCES"

# ldd's names but for the loader and the kernel's own; the newest glibc that a symbol asks for.
libraries() { ldd "$1" | awk '{ print $1 }' | grep -v 'linux-vdso\|ld-linux' | sort; }
newest_glibc() { objdump -T "$1" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -1; }

check() { # executable, newest glibc allowed
  local foreign; foreign=$(libraries "$1" | grep -vE '^lib(c|m|dl|rt|pthread)\.so\.' || true)
  [ -z "$foreign" ] || { echo "error: $1 needs $foreign, expected parts of glibc only" >&2; exit 1; }
  local needs; needs=$(newest_glibc "$1")
  [ "$(printf '%s\n%s\n' "$needs" "$2" | sort -V | tail -1)" = "$2" ] || { echo "error: $1 needs glibc $needs, expected $2 at most" >&2; exit 1; }
  ! objdump -h "$1" | grep -q '\.debug_info' || { echo "error: $1 is not stripped" >&2; exit 1; }
  "$1" --version
  echo "needs $(libraries "$1" | tr '\n' ' ')of glibc $needs; $(stat -c %s "$1") bytes"
}

pack() { # name, executable
  local folder=$cache/$1; rm -rf "$folder"; mkdir -p "$folder/completions"
  cp "$2" "$folder/volley"; cp LICENSE README.md "$cache/LICENCES" "$folder/"
  for shell in bash zsh fish; do "$2" completions $shell >"$folder/completions/volley.$shell"; done
  [ -z "${3:-}" ] || cp "$3" "$folder/LICENCE-NCCL"
  # The same files give the same archive.
  tar -C "$cache" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct 2>/dev/null || echo 0)" -cf - "$1" | gzip -n >"$out/$1.tar.gz"
  (cd "$out" && sha256sum "$1.tar.gz" | tee "$1.tar.gz.sha256")
}

# Plain, for old glibc: zig brings glibc's symbol versions, and its own unwinder in place of libgcc_s.
[ -x "$cache/zig/bin/cargo-zigbuild" ] || python3 -m pip install -q --target "$cache/zig" cargo-zigbuild==0.24.1 ziglang==0.17.1
PATH=$cache/zig/bin:$PATH PYTHONPATH=$cache/zig CARGO_ZIGBUILD_PYTHON_PATH=$(command -v python3) CARGO_TARGET_DIR=$cache/plain \
  cargo zigbuild --locked --profile dist --bin volley --target x86_64-unknown-linux-gnu.$GLIBC
plain=$cache/plain/x86_64-unknown-linux-gnu/dist/volley
check "$plain" $GLIBC
pack "volley-$version-x86_64-linux" "$plain"

if [ -z "${NCCL_STATIC_DIR:-}" ]; then
  echo "note: no NCCL_STATIC_DIR, so no file with NCCL inside; NVIDIA's package libnccl-dev has libnccl_static.a" >&2
  exit 0
fi
# What asks for libgcc_s gets the same from gcc's archives.
mkdir -p "$cache/libgcc" && echo 'GROUP ( -lgcc_eh -lgcc )' >"$cache/libgcc/libgcc_s.so"
# An archive made on a newer glibc asks for names that this one may lack.
cc -O2 -c scripts/isoc23.c -o "$cache/isoc23.o"
RUSTFLAGS="-L native=$cache/libgcc -C link-arg=$cache/isoc23.o" CARGO_TARGET_DIR=$cache/nccl cargo build --locked --profile dist --bin volley --features static-nccl
with_nccl=$cache/nccl/dist/volley
check "$with_nccl" "$(ldd --version | sed -n '1s/.* //p')"
"$with_nccl" --version | grep -q 'NCCL: .* linked in' || { echo "error: NCCL is not in it" >&2; exit 1; }
notice=
for file in "$NCCL_STATIC_DIR"/LICENSE* "$NCCL_STATIC_DIR"/../LICENSE* /usr/share/doc/libnccl-dev/copyright; do [ -f "$file" ] && notice=$file && break; done
[ -n "$notice" ] || { echo "error: NCCL's licence was not found beside $NCCL_STATIC_DIR; it goes with the release" >&2; exit 1; }
pack "volley-$version-x86_64-linux-nccl" "$with_nccl" "$notice"
