"""Logits far from the start of a text, in f64, written from the models' papers and not from our code: the tiny Llama in ../tiny/llama with each kind of rope,
248 tokens. Its own kind is first compared with transformers (../tiny/llama/golden.json). Writes logits.json beside itself: for each kind the config's
rope_scaling and the five best ids with their logits at positions 32, 200 and 247.
Run: python3 make_logits.py (needs numpy)
"""
import json
import pathlib
import struct

import numpy as np

from make import linear, llama3, plain, yarn

HERE = pathlib.Path(__file__).parent
TINY = HERE.parent / "tiny" / "llama"
KINDS = {
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def tensors(path):
    raw = path.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    out = {}
    for name, entry in json.loads(raw[8 : 8 + n]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            bits = np.frombuffer(raw[8 + n + begin : 8 + n + end], dtype="<u2").astype(np.uint32) << 16
            out[name] = bits.view(np.float32).astype(np.float64).reshape(entry["shape"])
    return out


def frequencies(kind, theta, dim):
    scaling = KINDS[kind]
    if kind == "llama3":
        return llama3(theta, dim, 8.0, 1.0, 4.0, 32), 1.0
    if kind == "linear":
        return linear(theta, dim, scaling["factor"]), 1.0
    if kind == "yarn":
        return yarn(theta, dim, 4.0, 64), 0.1 * np.log(4.0) + 1.0
    return plain(theta, dim), 1.0


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def logits(ids, config, w, kind):
    heads, kv_heads, dim, eps = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], config["rms_norm_eps"]
    table, factor = frequencies(kind, config["rope_theta"], dim)
    angles = np.outer(np.arange(len(ids)), table)
    cos, sin = np.cos(angles)[:, None] * factor, np.sin(angles)[:, None] * factor

    def rotate(x):  # [tokens, heads, dim]: the first half against the second
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][ids]
    later = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for layer in range(config["num_hidden_layers"]):
        at = lambda name: w[f"model.layers.{layer}.{name}.weight"]
        h = norm(x, at("input_layernorm"), eps)
        q = rotate((h @ at("self_attn.q_proj").T).reshape(len(ids), heads, dim))
        k = rotate((h @ at("self_attn.k_proj").T).reshape(len(ids), kv_heads, dim))
        v = (h @ at("self_attn.v_proj").T).reshape(len(ids), kv_heads, dim)
        out = np.empty_like(q)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / np.sqrt(dim) + later
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, shared]
        x = x + out.reshape(len(ids), -1) @ at("self_attn.o_proj").T
        h = norm(x, at("post_attention_layernorm"), eps)
        gate = h @ at("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
    head = w["model.embed_tokens.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    return norm(x, w["model.norm.weight"], eps) @ head.T


def main():
    config = json.loads((TINY / "config.json").read_text())
    golden = json.loads((TINY / "golden.json").read_text())
    w = tensors(TINY / "model.safetensors")
    ids = golden["input_ids"] + golden["greedy_ids"]
    ours = logits(ids, config, w, "llama3")[len(golden["input_ids"]) - 1 :]
    for row, best, values in zip(ours, golden["greedy_top5_ids"], golden["greedy_top5_logits"]):
        assert np.abs(row[best] - values).max() < 2e-4, (row[best], values)
    ids = [(37 * i + 11) % 500 for i in range(248)]
    cases = []
    for kind, scaling in KINDS.items():
        rows = logits(ids, config, w, kind)
        top = lambda position: [int(i) for i in np.argsort(-rows[position])[:5]]
        at = [{"position": p, "ids": top(p), "logits": [round(float(rows[p][i]), 6) for i in top(p)]} for p in (32, 200, 247)]
        cases.append({"kind": kind, "scaling": scaling, "rows": at})
    (HERE / "logits.json").write_text(json.dumps({"input_ids": ids, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
