#!/usr/bin/env python3
"""Write tests/data/draft: a tiny random target, drafters in every dialect and with every flag, and what they must compute.

    python3 scripts/make_draft_golden.py [--smollm2 models/smollm2-135m-instruct]

The arithmetic is float64 numpy, written from the EAGLE-3 paper (arXiv 2503.01840) and its authors' code, not from the engine. Each golden.json has,
for prefixes of one text: the token that the target chooses after the prefix, and the chain of greedy drafts behind it with the logits of every
step. smollm2.json has the same for the shipped drafter (drafts, their best five logits), and its accept length on greedy text with 6 drafts.
Needs numpy. Byte-deterministic.
"""

import argparse
import json
import math
from pathlib import Path
import numpy as np

K = 4  # drafts of a chain
ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests/data/draft"


# ---- safetensors
def to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def store(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name in sorted(tensors):
        dtype, x = tensors[name]
        x = {
            "BF16": to_bf16,
            "F16": lambda x: x.astype(np.float16),
            "F32": lambda x: x.astype(np.float32),
            "I64": lambda x: x.astype(np.int64),
            "I32": lambda x: x.astype(np.int32),
            "BOOL": lambda x: x.astype(np.uint8),
        }[dtype](x)
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def load(path):
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    out = {}
    for name, t in json.loads(raw[8 : 8 + n]).items():
        if name == "__metadata__":
            continue
        b = raw[8 + n + t["data_offsets"][0] : 8 + n + t["data_offsets"][1]]
        if t["dtype"] == "BF16":
            x = (np.frombuffer(b, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            x = np.frombuffer(b, {"F16": np.float16, "F32": np.float32, "I64": np.int64, "I32": np.int32, "BOOL": np.uint8}[t["dtype"]])
        out[name] = x.reshape(t["shape"])
    return out


# ---- arithmetic
def norm(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def silu(x):
    return x / (1 + np.exp(-x))


def frequencies(c, dim):
    f = c.get("rope_theta", 10000.0) ** (-np.arange(0, dim, 2) / dim)
    s = c.get("rope_scaling")
    if not s:
        return f, 1.0
    assert s.get("rope_type", s.get("type")) == "yarn"
    turns = (
        lambda t: dim * math.log(s["original_max_position_embeddings"] / (t * 2 * math.pi)) / (2 * math.log(c.get("rope_theta", 10000.0)))
    )
    low, high = max(math.floor(turns(32)), 0), min(math.ceil(turns(1)), dim - 1)
    stretch = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    size = 1.0 if "mscale" in s else 0.1 * math.log(s["factor"]) + 1  # mscale and mscale_all_dim are equal here
    return f * (1 - stretch) + f / s["factor"] * stretch, size


def rotate_pairs(x, positions, freq):  # x [T, heads, dim]: 2i with 2i + 1
    angle = positions[:, None] * freq[0]
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    y = np.empty_like(x)
    y[..., 0::2], y[..., 1::2] = x[..., 0::2] * c - x[..., 1::2] * s, x[..., 1::2] * c + x[..., 0::2] * s
    return y


def rotate(x, positions, freq):  # x [T, heads, dim]
    angle = positions[:, None] * freq[0]
    c, s = (np.cos(angle) * freq[1])[:, None], (np.sin(angle) * freq[1])[:, None]
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def attend(q, keys, values, first, sharper=1.0):  # q [T, heads, dim] at positions first.., keys [S, kv heads, dim]
    group = q.shape[1] // keys.shape[1]
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(keys, group, 1)) / math.sqrt(q.shape[2]) * sharper
    scores[:, np.arange(len(keys))[None] > first + np.arange(len(q))[:, None]] = -np.inf
    w = np.exp(scores - scores.max(-1, keepdims=True))
    w /= w.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", w, np.repeat(values, group, 1)).reshape(len(q), -1)


def target(c, w, ids):
    """Hidden states that enter layers 0 .. n, [n + 1][T, H], and logits [T, V]."""
    heads, kv, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    dim = c.get("head_dim") or c["hidden_size"] // heads
    freq, T = frequencies(c, dim), len(ids)
    pos = np.arange(T)
    x = w["model.embed_tokens.weight"][ids]
    entries = [x]
    for i in range(c["num_hidden_layers"]):
        W = lambda name: w[f"model.layers.{i}.{name}.weight"]
        n = norm(x, W("input_layernorm"), eps)
        q, k, v = ((n @ W(f"self_attn.{p}_proj").T).reshape(T, -1, dim) for p in "qkv")
        x = x + attend(rotate(q, pos, freq), rotate(k, pos, freq), v, 0) @ W("self_attn.o_proj").T
        n = norm(x, W("post_attention_layernorm"), eps)
        x = x + (silu(n @ W("mlp.gate_proj").T) * (n @ W("mlp.up_proj").T)) @ W("mlp.down_proj").T
        entries.append(x)
    return entries, norm(x, w["model.norm.weight"], eps) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


class Drafter:
    """Canonical names (midlayer.*); `flags` are the six of the config."""

    def __init__(self, c, w, embed, head, flags):
        self.w, self.embed, self.head, self.flags, self.eps = (
            w,
            w.get("embed_tokens.weight", embed),
            w.get("lm_head.weight", head),
            flags,
            c["rms_norm_eps"],
        )
        self.c = c
        self.dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        self.freq = frequencies(c, c.get("qk_rope_head_dim", self.dim))
        self.map = np.arange(len(self.head)) + (w["d2t"].astype(np.int64) if "d2t" in w else 0)

    def W(self, name):
        return self.w[name + ".weight"]

    def fuse(self, features):  # list of [T, H] -> [T, Hd]
        if self.flags.get("fc_norm"):
            features = [norm(f, self.W(f"fc_norm.{i}"), self.eps) for i, f in enumerate(features)]
        x = np.concatenate(features, -1)
        if self.flags.get("norm_before_fc"):
            x = norm(x, self.W("input_norm"), self.eps)
        return x @ self.W("fc").T

    def rows(self, tokens, f, cache, first):
        """Runs rows first.., whose cache entries are replaced; the layer's output and what the next step is fed."""
        m, T = "midlayer.", len(tokens)
        n = norm(f, self.W(m + "hidden_norm"), self.eps)
        z = np.concatenate([norm(self.embed[tokens], self.W(m + "input_layernorm"), self.eps), n], -1)
        pos = first + np.arange(T)
        sharper = 1.0
        if "kv_lora_rank" in self.c:
            q, k, v, sharper = self.latent(z, pos)
        else:
            q, k, v = ((z @ self.W(m + f"self_attn.{p}_proj").T).reshape(T, -1, self.dim) for p in "qkv")
            if m + "self_attn.q_norm.weight" in self.w:
                q, k = norm(q, self.W(m + "self_attn.q_norm"), self.eps), norm(k, self.W(m + "self_attn.k_norm"), self.eps)
            q, k = rotate(q, pos, self.freq), rotate(k, pos, self.freq)
        cache[0] = np.concatenate([cache[0][:first].reshape(-1, *k.shape[1:]), k])
        cache[1] = np.concatenate([cache[1][:first].reshape(-1, *v.shape[1:]), v])
        x = n if self.flags.get("norm_before_residual") else f
        x = x + attend(q, *cache, first, sharper) @ self.W(m + "self_attn.o_proj").T
        y = norm(x, self.W(m + "post_attention_layernorm"), self.eps)
        x = x + (silu(y @ self.W(m + "mlp.gate_proj").T) * (y @ self.W(m + "mlp.up_proj").T)) @ self.W(m + "mlp.down_proj").T
        return x

    def latent(self, z, pos):
        """Latent attention in its plain form: keys and values of each head, made of the latent."""
        c, p, T = self.c, "midlayer.self_attn.", len(z)
        nope, heads, rank = c["qk_nope_head_dim"], c["num_attention_heads"], c["kv_lora_rank"]
        q = norm(z @ self.W(p + "q_a_proj").T, self.W(p + "q_a_layernorm"), 1e-6) @ self.W(p + "q_b_proj").T
        q = q.reshape(T, heads, -1)
        kv = z @ self.W(p + "kv_a_proj_with_mqa").T
        kv_b = (norm(kv[:, :rank], self.W(p + "kv_a_layernorm"), 1e-6) @ self.W(p + "kv_b_proj").T).reshape(T, heads, -1)
        k_rope = rotate_pairs(kv[:, None, rank:], pos, self.freq)
        q = np.concatenate([q[..., :nope], rotate_pairs(q[..., nope:], pos, self.freq)], -1)
        k = np.concatenate([kv_b[..., :nope], np.repeat(k_rope, heads, 1)], -1)
        s = c["rope_scaling"]
        return q, k, kv_b[..., nope:], (0.1 * s["mscale_all_dim"] * math.log(s["factor"]) + 1) ** 2

    def chain(self, x, cache, first, k):
        """k greedy drafts from the output row x [1, Hd] of entry first - 1: target ids, and logits [k, Vd]."""
        drafts, logits = [], []
        for i in range(k):
            normed = norm(x, self.W("norm"), self.eps)
            logits.append((normed @ self.head.T)[0])
            drafts.append(int(self.map[logits[-1].argmax()]))
            if i + 1 < k:
                x = self.rows([drafts[-1]], normed if self.flags.get("norm_output") else x, cache, first + i)
        return drafts, logits


def chains(drafter, ids, features, k, ends):
    """For each n of `ends`: drafts behind the text ids[:n + 1], whose last token is the root; the drafter has rows 0 .. n - 1."""
    f = drafter.fuse(features)
    cache = [np.zeros((0, 1)) for _ in range(2)]
    x = drafter.rows(ids[1:], f[: len(ids) - 1], cache, 0)
    return [drafter.chain(x[n - 1 : n], [c[:n] for c in cache], n, k) for n in ends]


# ---- tiny models
H, V, LAYERS = 32, 96, 4
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
BASE = {
    "hidden_size": H,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
}
IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
# As TorchSpec writes them for Kimi-K2.
LATENT = {
    **BASE,
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": None,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
    },
}
# name: config as stored, layer entries that it means, flags, prefixes that the file's names have, dtype, options
DRAFTERS = {
    # No layer ids: the entries are the engine's guess for 4 layers.
    "safeailab": (
        {**BASE, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": 40, "hidden_act": "silu"},
        [1, 2, 3],
        {},
        "midlayer.",
        "F16",
        {},
    ),
    "specforge": (
        {
            **BASE,
            **LLAMA,
            "head_dim": 16,
            "draft_vocab_size": 40,
            "rope_theta": 50000.0,
            "attention_bias": False,
            "norm_before_fc": True,
            "eagle_config": {IDS: [0, 1, 2], "use_aux_hidden_state": True},
        },
        [1, 2, 3],
        {"norm_before_fc": True},
        "model.midlayer.",
        "BF16",
        {"embed": True},
    ),
    "speculators": (
        {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "model_type": "speculator_model",
            "draft_vocab_size": 40,
            "target_hidden_size": H,
            IDS: [2, 3, 4],
            "norm_output": True,
            "transformer_layer_config": {**BASE, "model_type": "qwen3", "head_dim": 8, "use_sliding_window": False},
        },
        [2, 3, 4],
        {"norm_before_residual": True, "norm_output": True},
        "layers.0.",
        "BF16",
        {"qk_norm": True, "embed": True, "d2t": "I32"},
    ),
    "modelopt": (
        {
            **BASE,
            **LLAMA,
            "draft_vocab_size": V,
            "eagle_config": {
                IDS: [1, 2, 3],
                "use_aux_hidden_state": True,
                "use_last_layernorm": True,
                "use_input_layernorm_in_first_layer": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
            },
        },
        [2, 3, 4],
        {},
        "layers.0.",
        "F32",
        {"share_head": True},
    ),
    "eagle31": (
        {**BASE, **LLAMA, "fc_norm": True, "norm_output": True, IDS: [2, 3]},
        [2, 3],
        {"fc_norm": True, "norm_output": True},
        "midlayer.",
        "BF16",
        {},
    ),
    "aux_norm": (
        {**BASE, **LLAMA, "use_aux_norm": True, "norm_before_residual": True, "draft_vocab_size": 40, IDS: [0, 1, 2]},
        [1, 2, 3],
        {"fc_norm": True, "norm_before_residual": True},
        "midlayer.",
        "BF16",
        {"old_aux": True},
    ),
    "narrow": (
        {
            **BASE,
            **LLAMA,
            "hidden_size": 24,
            "target_hidden_size": H,
            "draft_vocab_size": 40,
            IDS: [2, 3, 4],
            "eagle_config": {},
            "speculators_model_type": "eagle3",
            "norm_before_residual": False,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
        [2, 3, 4],
        {},
        "midlayer.",
        "BF16",
        {"embed": True},
    ),
    "latent": (
        {**LATENT, "draft_vocab_size": 40, "eagle_config": {IDS: [1, 2, 3], "use_aux_hidden_state": True}},
        [2, 3, 4],
        {},
        "layers.0.",
        "BF16",
        {"embed": True},
    ),
    "latent31": (
        {**LATENT, "fc_norm": True, "norm_output": True, IDS: [2, 3]},
        [2, 3],
        {"fc_norm": True, "norm_output": True},
        "midlayer.",
        "BF16",
        {},
    ),
}


def rounded(x, dtype):
    return {
        "BF16": lambda: (to_bf16(x).astype(np.uint32) << 16).view(np.float32),
        "F16": lambda: x.astype(np.float16),
        "F32": lambda: x.astype(np.float32),
    }[dtype]().astype(np.float64)


def random_weights(rng, shapes, dtype):
    """Norms away from 1 and linears that keep a row's size, so that every part matters."""
    w = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape)
        w[name] = rounded(1 + 0.3 * x if len(shape) == 1 else x * (1.5 / math.sqrt(shape[1])), dtype)
    return w


def attention_shapes(c, p, hd, heads, kvh, dim):
    if "kv_lora_rank" not in c:
        return {
            p + "q_proj.weight": (heads * dim, 2 * hd),
            p + "k_proj.weight": (kvh * dim, 2 * hd),
            p + "v_proj.weight": (kvh * dim, 2 * hd),
            p + "o_proj.weight": (hd, heads * dim),
        }
    q_rank, rank, nope, rope, v = (c[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        p + "q_a_proj.weight": (q_rank, 2 * hd),
        p + "q_a_layernorm.weight": (q_rank,),
        p + "q_b_proj.weight": (heads * (nope + rope), q_rank),
        p + "kv_a_proj_with_mqa.weight": (rank + rope, 2 * hd),
        p + "kv_a_layernorm.weight": (rank,),
        p + "kv_b_proj.weight": (heads * (nope + v), rank),
        p + "o_proj.weight": (hd, heads * v),
    }


def tiny():
    OUT.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    d, kv, I = 32, 16, TARGET["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (H,),
            p + "post_attention_layernorm.weight": (H,),
            p + "self_attn.q_proj.weight": (d, H),
            p + "self_attn.k_proj.weight": (kv, H),
            p + "self_attn.v_proj.weight": (kv, H),
            p + "self_attn.o_proj.weight": (H, d),
            p + "mlp.gate_proj.weight": (I, H),
            p + "mlp.up_proj.weight": (I, H),
            p + "mlp.down_proj.weight": (H, I),
        }
    w = random_weights(rng, shapes, "BF16")
    write(OUT / "target", TARGET, {k: ("BF16", x) for k, x in w.items()})
    ids = rng.integers(2, V, 24)
    for name, (config, entries, flags, prefix, dtype, opt) in DRAFTERS.items():
        c = {**config.get("transformer_layer_config", {}), **config}
        hd, heads, kvh, I = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["intermediate_size"]
        dim, vd, n = c.get("head_dim") or hd // heads, c.get("draft_vocab_size", V), len(entries)
        m = "midlayer."
        shapes = {
            "fc.weight": (hd, n * H),
            "norm.weight": (hd,),
            m + "input_layernorm.weight": (hd,),
            m + "hidden_norm.weight": (hd,),
            m + "post_attention_layernorm.weight": (hd,),
            **attention_shapes(c, m + "self_attn.", hd, heads, kvh, dim),
            m + "mlp.gate_proj.weight": (I, hd),
            m + "mlp.up_proj.weight": (I, hd),
            m + "mlp.down_proj.weight": (hd, I),
        }
        if not opt.get("share_head"):
            shapes["lm_head.weight"] = (vd, hd)
        if opt.get("embed"):
            shapes["embed_tokens.weight"] = (V, hd)
        if opt.get("qk_norm"):
            shapes |= {m + f"self_attn.{x}_norm.weight": (dim,) for x in "qk"}
        if flags.get("norm_before_fc"):
            shapes["input_norm.weight"] = (n * H,)
        if flags.get("fc_norm"):
            shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(n)}
        dw = random_weights(rng, shapes, dtype)
        stored = {k: (dtype, x) for k, x in dw.items()}
        if vd < V:
            keep = np.sort(rng.choice(V, vd, replace=False))
            dw["d2t"] = keep - np.arange(vd)
            stored["d2t"] = (opt.get("d2t", "I64"), dw["d2t"])
            stored["t2d"] = ("BOOL", np.isin(np.arange(V), keep))
        old = {f"fc_norm.{i}": f"aux_norm_{x}" for i, x in enumerate(("low", "mid", "high"))} if opt.get("old_aux") else {}
        rename = lambda k: prefix + k[len(m) :] if k.startswith(m) else old.get(k[:-7], k[:-7]) + ".weight" if k.endswith(".weight") else k
        if prefix.startswith("model."):  # all but the head and the maps stand under it
            plain = rename
            rename = lambda k: (
                plain(k) if k.startswith(m) or k.startswith("lm_head") or k.endswith("2t") or k.endswith("2d") else "model." + plain(k)
            )
        write(OUT / name, config, {rename(k): x for k, x in stored.items()})
        cases = []
        for n_prefix in (1, 7, 19):
            prefix_ids = ids[:n_prefix]
            logits = target(TARGET, w, prefix_ids)[1][-1]
            text = np.append(prefix_ids, logits.argmax())
            states, _ = target(TARGET, w, text)
            drafter = Drafter(c, dw, w["model.embed_tokens.weight"], w["lm_head.weight"], flags)
            [(drafts, steps)] = chains(drafter, text, [states[e] for e in entries], K, [n_prefix])
            cases.append(
                {"prompt": prefix_ids.tolist(), "root": int(text[-1]), "drafts": drafts, "logits": [np.round(s, 7).tolist() for s in steps]}
            )
        (OUT / name / "golden.json").write_text(json.dumps({"entries": entries, "cases": cases}) + "\n")
        margin = min(np.diff(np.sort(s)[-2:])[0] for case in cases for s in case["logits"])
        print(f"{name}: entries {entries}, least margin {margin:.4f}")


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    store(folder / "model.safetensors", tensors)


# ---- the shipped drafter
def smollm2(folder):
    c = json.loads((folder / "config.json").read_text())
    w = {k: x.astype(np.float32) for k, x in load(folder / "model.safetensors").items()}
    folder = folder.parent / (folder.name + "-eagle3")
    dc = json.loads((folder / "config.json").read_text())
    dw = {k: x if k in ("d2t", "t2d") else x.astype(np.float32) for k, x in load(folder / "model.safetensors").items()}
    embed = w["model.embed_tokens.weight"]
    drafter = Drafter(dc, dw, embed, None, {})
    out = {}
    for name in ("chat", "code"):
        golden = json.loads((ROOT / f"tests/data/golden/{name}.json").read_text())
        n, text = len(golden["prompt_ids"]), np.array(golden["prompt_ids"] + golden["greedy_ids"])
        states, _ = target(c, w, text)
        # Each root from the first sampled token on: text[:n + 1] ends in it. n - 1 rows of the prompt, and the row that made it.
        ends = list(range(n, len(text)))
        cs = chains(drafter, text, [states[e] for e in (2, 15, 27)], 6, ends)
        tokens = cycles = 0
        at = n  # index of the root
        tried, hit = [0] * 6, [0] * 6
        while at + 6 < len(text):
            drafts = cs[at - n][0]
            a = 0
            while a < 6:
                tried[a] += 1
                if drafts[a] != text[at + 1 + a]:
                    break
                hit[a] += 1
                a += 1
            tokens, cycles, at = tokens + a + 1, cycles + 1, at + a + 1
        entry = {"tokens": tokens, "cycles": cycles, "tried": tried, "hit": hit}
        best = lambda s: np.argsort(-s, kind="stable")[:5]
        entry["chains"] = [
            {
                "drafts": d,
                "ids": [drafter.map[best(s)].tolist() for s in ls],
                "logits": [np.round(s[best(s)].astype(float), 5).tolist() for s in ls],
            }
            for d, ls in cs[:24]
        ]
        out[name] = entry
        print(f"{name}: accept length {tokens / cycles:.3f} in {cycles} cycles")
    (OUT / "smollm2.json").write_text(json.dumps(out) + "\n")


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--smollm2", type=Path)
    args = ap.parse_args()
    tiny()
    if args.smollm2:
        smollm2(args.smollm2)
