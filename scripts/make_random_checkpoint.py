#!/usr/bin/env python3
"""Writes a checkpoint of random weights for a config.json, in shards of about 5 GB, to measure how fast a large one loads: of a Llama-like model in bf16, or
of a Kimi-K2 with INT4 experts.

    python3 scripts/make_random_checkpoint.py tests/shapes/llama-3.1-8b OUT [LAYERS]

LAYERS of the model's are written, and config.json says so. The numbers repeat every 64 MB: what is measured is reading, not compression."""

import json
import math
import random
import sys
from pathlib import Path

shape, out = Path(sys.argv[1]), Path(sys.argv[2])
config = json.loads((shape / "config.json").read_text())
c = config.get("text_config", config)
if len(sys.argv) > 3:
    c["num_hidden_layers"] = int(sys.argv[3])
H, I, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
top = "language_model." if "text_config" in config else ""
SIZES = {"BF16": 2, "F32": 4, "I32": 4}
tensors = []


def add(name, *shape, dtype="BF16"):
    tensors.append((top + name, dtype, shape))


def dense(name, rows, columns):
    add(name + ".weight", rows, columns)


def packed(name, rows, columns):  # compressed-tensors, groups of 32
    add(name + ".weight_packed", rows, columns // 8, dtype="I32")
    add(name + ".weight_scale", rows, columns // 32)


def mlp(name, size, matrix):
    for n, s in (("gate", (size, H)), ("up", (size, H)), ("down", (H, size))):
        matrix(f"{name}.{n}_proj", *s)


dense("model.embed_tokens", V, H)
for i in range(c["num_hidden_layers"]):
    p = f"model.layers.{i}."
    heads = c["num_attention_heads"]
    if "kv_lora_rank" in c:
        q, kv, nope, rope, v = (c[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        for n, s in (("q_a_proj", (q, H)), ("q_b_proj", (heads * (nope + rope), q)), ("kv_a_proj_with_mqa", (kv + rope, H)), ("kv_b_proj", (heads * (nope + v), kv)), ("o_proj", (H, heads * v))):
            dense(p + "self_attn." + n, *s)
        add(p + "self_attn.q_a_layernorm.weight", q)
        add(p + "self_attn.kv_a_layernorm.weight", kv)
    else:
        dim = c.get("head_dim") or H // heads
        q, kv = heads * dim, c["num_key_value_heads"] * dim
        for n, s in (("q", (q, H)), ("k", (kv, H)), ("v", (kv, H)), ("o", (H, q))):
            dense(p + f"self_attn.{n}_proj", *s)
    if i < c.get("first_k_dense_replace", c["num_hidden_layers"]):
        mlp(p + "mlp", I, dense)
    else:
        add(p + "mlp.gate.weight", c["n_routed_experts"], H)
        add(p + "mlp.gate.e_score_correction_bias", c["n_routed_experts"], dtype="F32")
        mlp(p + "mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"], dense)
        for e in range(c["n_routed_experts"]):
            mlp(p + f"mlp.experts.{e}", c["moe_intermediate_size"], packed)
    for n in ("input_layernorm", "post_attention_layernorm"):
        add(p + n + ".weight", H)
add("model.norm.weight", H)
if not c.get("tie_word_embeddings"):
    dense("lm_head", V, H)

shards, room = [[]], 0
for name, dtype, s in tensors:
    n = SIZES[dtype] * math.prod(s)
    if room + n > 5 << 30 and shards[-1]:
        shards, room = shards + [[]], 0
    shards[-1].append((name, dtype, s, n))
    room += n
out.mkdir(parents=True, exist_ok=True)
(out / "config.json").write_text(json.dumps(config))
SIZE = 64 << 20
numbers = int.from_bytes(random.Random(0).randbytes(SIZE), "little")
masked = lambda keep, also: memoryview((numbers & int.from_bytes(bytes(keep) * (SIZE // 2), "little") | int.from_bytes(bytes(also) * (SIZE // 2), "little")).to_bytes(SIZE, "little"))
block = masked([0xFF, 0x81], [0, 0x3C])  # bf16 of 2^-7 to 2^-3 in size, or any codes
positive = masked([0xFF, 0x01], [0, 0x3C])  # scales
files = {}
for i, shard in enumerate(shards):
    name, header, at = f"model-{i + 1:05}-of-{len(shards):05}.safetensors", {}, 0
    for tensor, dtype, s, n in shard:
        header[tensor] = {"dtype": dtype, "shape": s, "data_offsets": [at, at + n]}
        files[tensor], at = name, at + n
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(out / name, "wb", buffering=0) as f:
        f.write(len(head).to_bytes(8, "little") + head)
        for tensor, dtype, s, n in shard:
            source = positive if tensor.endswith("_scale") else block
            while n > 0:
                n -= f.write(source[: min(n, len(source))])
(out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
print(f"{out}: {len(shards)} shards, {sum(t[-1] for shard in shards for t in shard) / 1e9:.2f} GB")
