#!/usr/bin/env python3
"""How far the shipped drafter is off when torch runs it, and its target, in bf16: mean and largest error of the golden top-5 logits of every draft in
tests/data/draft/smollm2.json (f32, scripts/make_draft_golden.py), each draft given. tests/gpu.rs holds the GPU backend to 1.5 times that.

    python3 scripts/draft_bf16.py --smollm2 DIR [--out tests/data/draft/smollm2_bf16.json]

The arithmetic is that of transformers: linear layers and the residual stream in bf16, norms, rotation angles and softmax in f32. Needs torch and
safetensors; runs on the CPU as well."""

import argparse
import json
from pathlib import Path
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
ap = argparse.ArgumentParser()
ap.add_argument("--smollm2", type=Path, required=True)
ap.add_argument("--out", type=Path, default=ROOT / "tests/data/draft/smollm2_bf16.json")
a = ap.parse_args()
dev = "cuda" if torch.cuda.is_available() else "cpu"


def load(folder):
    weights = load_file(folder / "model.safetensors")
    return json.loads((folder / "config.json").read_text()), {
        k: v.to(dev, torch.bfloat16) if v.is_floating_point() else v.to(dev) for k, v in weights.items()
    }


c, w = load(a.smollm2)
dc, dw = load(ROOT / "models/smollm2-135m-instruct-eagle3")
EPS, HD = c["rms_norm_eps"], c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def norm(x, weight):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rotate(x, pos, theta):  # x [T, heads, HD]
    angle = pos[:, None].float() * theta ** (-torch.arange(0, HD, 2, device=dev).float() / HD)
    cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., HD // 2 :], x[..., : HD // 2]], -1) * sin


def attend(q, keys, values, first):  # q [T, heads, HD] at positions first.., keys [S, kv heads, HD]
    group = q.shape[1] // keys.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * HD**-0.5
    late = torch.arange(len(keys), device=dev)[None] > first + torch.arange(len(q), device=dev)[:, None]
    p = scores.masked_fill(late, float("-inf")).float().softmax(-1).to(q.dtype)
    return (p @ v).transpose(0, 1).reshape(len(q), -1)


def layer(weights, prefix, x, z, cache, first, theta, norm_name):
    """One decoder layer with input z for attention; replaces cache rows first.. and returns the residual stream."""
    W = lambda name: weights[f"{prefix}.{name}.weight"]
    q, k, v = (F.linear(z, W(f"self_attn.{p}_proj")).view(len(z), -1, HD) for p in "qkv")
    pos = torch.arange(first, first + len(z), device=dev)
    cache[0] = torch.cat([cache[0][:first], rotate(k, pos, theta)])
    cache[1] = torch.cat([cache[1][:first], v])
    x = x + F.linear(attend(rotate(q, pos, theta), *cache, first), W("self_attn.o_proj"))
    y = norm(x, W(norm_name))
    return x + F.linear(F.silu(F.linear(y, W("mlp.gate_proj"))) * F.linear(y, W("mlp.up_proj")), W("mlp.down_proj"))


def empty(n_kv_heads):
    return [torch.zeros(0, n_kv_heads, HD, device=dev, dtype=torch.bfloat16) for _ in range(2)]


@torch.no_grad()
def features(ids):
    """Residual streams that enter the tapped layers."""
    x, entries = w["model.embed_tokens.weight"][ids], []
    for i in range(c["num_hidden_layers"]):
        entries.append(x)
        z = norm(x, w[f"model.layers.{i}.input_layernorm.weight"])
        x = layer(w, f"model.layers.{i}", x, z, empty(c["num_key_value_heads"]), 0, c["rope_theta"], "post_attention_layernorm")
    taps = [i + 1 for i in dc["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    return torch.cat([entries[t] for t in taps], -1)


def rows(tokens, f, cache, first):
    e = norm(w["model.embed_tokens.weight"][tokens], dw["midlayer.input_layernorm.weight"])
    z = torch.cat([e, norm(f, dw["midlayer.hidden_norm.weight"])], -1)
    return layer(dw, "midlayer", f, z, cache, first, dc["rope_theta"], "post_attention_layernorm")


@torch.no_grad()
def errors(text, golden):
    ids = torch.tensor(text["prompt_ids"] + text["greedy_ids"], device=dev)
    target_of = torch.arange(dc["draft_vocab_size"], device=dev) + dw["d2t"]
    draft_of = {int(t): i for i, t in enumerate(target_of)}
    f = F.linear(features(ids), dw["fc.weight"])
    cache = empty(dc["num_key_value_heads"])
    x = rows(ids[1:], f[:-1], cache, 0)
    off = []
    for i, chain in enumerate(golden["chains"]):
        n = len(text["prompt_ids"]) + i
        row, own = x[n - 1 : n], [t[:n] for t in cache]
        for step, draft in enumerate(chain["drafts"]):
            logits = F.linear(norm(row, dw["norm.weight"]), dw["lm_head.weight"])[0].float()
            off += [abs(float(logits[draft_of[id]]) - l) for id, l in zip(chain["ids"][step], chain["logits"][step])]
            row = rows(torch.tensor([draft], device=dev), row, own, n + step)
    return {"mean": sum(off) / len(off), "max": max(off)}


goldens = json.loads((ROOT / "tests/data/draft/smollm2.json").read_text())
out = {name: errors(json.loads((ROOT / f"tests/data/golden/{name}.json").read_text()), golden) for name, golden in goldens.items()}
a.out.write_text(json.dumps(out) + "\n")
print(out)
