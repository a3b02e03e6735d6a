#!/usr/bin/env python3
"""Writes a checkpoint of random bf16 weights for a Llama-like config.json, in shards of about 5 GB, to measure how fast a large one loads.

    python3 scripts/make_random_checkpoint.py tests/shapes/llama-3.1-8b OUT

Needs numpy. The numbers repeat every 64 MB: what is measured is reading, not compression."""

import json
import shutil
import sys
from pathlib import Path
import numpy as np

shape, out = Path(sys.argv[1]), Path(sys.argv[2])
c = json.loads((shape / "config.json").read_text())
H, I, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
dim = c.get("head_dim") or H // c["num_attention_heads"]
q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
tensors = [("model.embed_tokens.weight", (V, H))]
for i in range(c["num_hidden_layers"]):
    p = f"model.layers.{i}."
    tensors += [(p + f"self_attn.{n}_proj.weight", s) for n, s in (("q", (q, H)), ("k", (kv, H)), ("v", (kv, H)), ("o", (H, q)))]
    tensors += [(p + f"mlp.{n}_proj.weight", s) for n, s in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I)))]
    tensors += [(p + n + ".weight", (H,)) for n in ("input_layernorm", "post_attention_layernorm")]
tensors += [("model.norm.weight", (H,))] + ([] if c.get("tie_word_embeddings") else [("lm_head.weight", (V, H))])

shards, room = [[]], 0
for name, s in tensors:
    n = 2 * int(np.prod(s))
    if room + n > 5 << 30 and shards[-1]:
        shards, room = shards + [[]], 0
    shards[-1].append((name, s, n))
    room += n
out.mkdir(parents=True, exist_ok=True)
shutil.copy(shape / "config.json", out)
block = (np.random.default_rng(0).standard_normal(32 << 20, dtype=np.float32) / np.float32(H**0.5)).view(np.uint32)
block = memoryview((block >> 16).astype(np.uint16)).cast("B")
files = {}
for i, shard in enumerate(shards):
    name, header, at = f"model-{i + 1:05}-of-{len(shards):05}.safetensors", {}, 0
    for tensor, s, n in shard:
        header[tensor] = {"dtype": "BF16", "shape": s, "data_offsets": [at, at + n]}
        files[tensor], at = name, at + n
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(out / name, "wb", buffering=0) as f:
        f.write(len(head).to_bytes(8, "little") + head)
        while at > 0:
            at -= f.write(block[: min(at, len(block))])
(out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
print(f"{out}: {len(shards)} shards, {sum(n for shard in shards for _, _, n in shard) / 1e9:.2f} GB")
