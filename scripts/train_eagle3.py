#!/usr/bin/env python3
"""Train a one-layer EAGLE-3 drafter for a small Llama-architecture chat model, on text the model writes itself.

    python3 train_eagle3.py --model DIR --out DIR [--resume FILE] [--gen-s 95 --train-s 390] [--prompts mt_bench.jsonl ...]

1. Self-generation: many rows continue the chat template's empty user turn; the user turn is sampled at temperature 1, the answer at
   one of --temps. No outside text, so benchmark prompts stay unseen.
2. Training-time test: the drafter is unrolled --steps times on ground-truth tokens, fed its own pre-norm output, attention causal over
   step-0 rows plus each row's own later keys (the same arithmetic as the inference chain); soft cross-entropy on the draft vocabulary.
3. Acceptance on greedy continuations of --prompts (never trained on), as accept length (1 + accepted drafts) and per-position rates.
Features: residual stream after layers 1, n/2-1, n-4 (0-based), concatenated low to high. Tensor names, d2t and config.json are those of SpecForge.
Needs torch, safetensors and tokenizers, one GPU, and a model whose chat template is ChatML (SYSTEM below is SmolLM2's). About 10 minutes on an
H200 for SmolLM2-135M. volley picks the drafter up when --out is the model's directory with -eagle3 behind its name.
"""

import argparse
import json
import math
import os
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

ap = argparse.ArgumentParser()
ap.add_argument("--model", required=True)
ap.add_argument("--out", required=True)
ap.add_argument("--resume")
ap.add_argument("--prompts", nargs="*", default=[])
ap.add_argument("--eval-n", type=int, default=8)
ap.add_argument("--eval-tokens", type=int, default=96)
ap.add_argument("--gen-s", type=float, default=95)
ap.add_argument("--train-s", type=float, default=390)
ap.add_argument("--rows", type=int, default=3072)
ap.add_argument("--length", type=int, default=448)
ap.add_argument("--batch", type=int, default=40)
ap.add_argument("--steps", type=int, default=5)
ap.add_argument("--lr", type=float, default=1.5e-3)
ap.add_argument("--draft-vocab", type=int, default=16384)
ap.add_argument("--temps", type=float, nargs="*", default=[0.02, 0.2, 0.5, 0.8])
ap.add_argument("--seed", type=int, default=0)
ap.add_argument("--device", default="cuda")
a = ap.parse_args()
dev = a.device
torch.manual_seed(a.seed)
T0 = time.time()
os.makedirs(a.out, exist_ok=True)


def log(*x):
    print(f"[{time.time()-T0:6.1f}]", *x, flush=True)


# ---- target
c = json.load(open(f"{a.model}/config.json"))
W = {k: v.to(dev, torch.bfloat16) for k, v in load_file(f"{a.model}/model.safetensors").items()}
H, NL, NH, NKV, I, V = (
    c[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
)
HD = c.get("head_dim") or H // NH
eps = c["rms_norm_eps"]
G = NH // NKV
AUX = (1, NL // 2 - 1, NL - 4)
inv = 1.0 / c["rope_theta"] ** (torch.arange(0, HD, 2, device=dev).float() / HD)
emb = W["model.embed_tokens.weight"]
head = W.get("lm_head.weight", emb)
fnorm = W["model.norm.weight"]


def rms(x, w):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * w


def rope(x, pos):  # [B, T, heads, HD], pos [T]
    g = pos[:, None].float() * inv
    co, si = g.cos()[None, :, None].to(x.dtype), g.sin()[None, :, None].to(x.dtype)
    x1, x2 = x[..., : HD // 2], x[..., HD // 2 :]
    return torch.cat([x1 * co - x2 * si, x2 * co + x1 * si], -1)


layers = []
for i in range(NL):
    p = f"model.layers.{i}."
    layers.append(
        dict(
            n1=W[p + "input_layernorm.weight"],
            n2=W[p + "post_attention_layernorm.weight"],
            qkv=torch.cat([W[p + f"self_attn.{x}_proj.weight"] for x in "qkv"]),
            o=W[p + "self_attn.o_proj.weight"],
            gu=torch.cat([W[p + "mlp.gate_proj.weight"], W[p + "mlp.up_proj.weight"]]),
            d=W[p + "mlp.down_proj.weight"],
        )
    )


@torch.no_grad()
def forward(ids, kv=None, start=0):
    """ids [B, n] -> (features [B, n, 3H], final-normed hidden [B, n, H]); with kv, appends to and attends over the cache."""
    B, n = ids.shape
    x = F.embedding(ids, emb)
    pos = torch.arange(start, start + n, device=dev)
    aux = []
    for i, l in enumerate(layers):
        q, k, v = (rms(x, l["n1"]) @ l["qkv"].T).split([NH * HD, NKV * HD, NKV * HD], -1)
        q = rope(q.view(B, n, NH, HD), pos)
        k = rope(k.view(B, n, NKV, HD), pos).transpose(1, 2)
        v = v.view(B, n, NKV, HD).transpose(1, 2)
        if kv is not None:
            kv[i][0][:, :, start : start + n] = k
            kv[i][1][:, :, start : start + n] = v
            k, v = kv[i][0][:, :, : start + n], kv[i][1][:, :, : start + n]
        if n == 1:
            o = F.scaled_dot_product_attention(q.view(B, NKV, G, HD), k, v).reshape(B, 1, NH * HD)
        else:
            o = (
                F.scaled_dot_product_attention(q.transpose(1, 2), k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), is_causal=True)
                .transpose(1, 2)
                .reshape(B, n, NH * HD)
            )
        x = x + o @ l["o"].T
        g, u = (rms(x, l["n2"]) @ l["gu"].T).chunk(2, -1)
        x = x + (F.silu(g) * u) @ l["d"].T
        if i in AUX:
            aux.append(x)
    return torch.cat(aux, -1), rms(x, fnorm)


tok = Tokenizer.from_file(f"{a.model}/tokenizer.json")
END = tok.token_to_id("<|im_end|>")
START = tok.token_to_id("<|im_start|>")
USER = tok.encode("user").ids[0]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n"


@torch.no_grad()
def generate(prefix, rows, total, temps=None):
    """rows continuations of one prefix to `total` tokens; temps None = greedy."""
    ids = torch.zeros(rows, total, dtype=torch.long, device=dev)
    P = prefix.numel()
    ids[:, :P] = prefix
    kv = [[torch.empty(rows, NKV, total, HD, device=dev, dtype=torch.bfloat16) for _ in range(2)] for _ in range(NL)]
    in_user = torch.ones(rows, dtype=torch.bool, device=dev)
    h = forward(ids[:, :P], kv)[1][:, -1]
    for t in range(P, total):
        lg = h @ head.T
        if temps is None:
            nx = lg.argmax(-1)
        else:
            noise = -torch.log(-torch.log(torch.rand(lg.shape, device=dev).clamp_(1e-9, 1 - 1e-7)))
            nx = (lg.float() / torch.where(in_user, 1.0, temps)[:, None] + noise).argmax(-1)
            in_user = (in_user & (nx != END)) | ((ids[:, t - 1] == START) & (nx == USER))
        ids[:, t] = nx
        if t < total - 1:
            h = forward(nx[:, None], kv, t)[1][:, -1]
    return ids


# ---- text and held-out continuations
pre = torch.tensor(tok.encode(SYSTEM).ids, device=dev)
chunks = []
t0 = time.time()
while time.time() - t0 < a.gen_s or not chunks:
    chunks.append(generate(pre, a.rows, a.length, torch.tensor(a.temps, device=dev).repeat(a.rows // len(a.temps))).cpu().to(torch.int32))
    log("tokens", sum(x.numel() for x in chunks))
data = torch.cat(chunks)
evals = {}
for f in a.prompts:
    out = []
    for line in open(f).read().splitlines()[: a.eval_n]:
        o = json.loads(line)
        p = torch.tensor(tok.encode(SYSTEM + o["turns"][0] + "<|im_end|>\n<|im_start|>assistant\n").ids, device=dev)
        if p.numel() < 700:
            out.append((generate(p, 1, p.numel() + a.eval_tokens)[0], p.numel()))
    evals[os.path.basename(f)] = out
log("held-out continuations", {k: len(v) for k, v in evals.items()})


# ---- drafter
class Drafter(nn.Module):
    def __init__(s):
        super().__init__()
        L = lambda i, o: nn.Linear(i, o, bias=False)
        ones = lambda: nn.Parameter(torch.ones(H))
        s.fc = L(3 * H, H)
        s.n_e, s.n_h, s.n_p, s.norm = ones(), ones(), ones(), ones()
        s.head = L(H, a.draft_vocab)
        s.q, s.k, s.v, s.o = L(2 * H, NH * HD), L(2 * H, NKV * HD), L(2 * H, NKV * HD), L(NH * HD, H)
        s.g, s.u, s.d = L(H, I), L(H, I), L(I, H)
        for m in s.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.02)

    def logits(s, r):
        return s.head(rms(r, s.norm))

    def unroll(s, ids, feat, steps):
        """Row t holds target feature t; step j reads token t+1+j and predicts token t+2+j. Yields [B, T, H] pre-norm per step."""
        B, T = ids.shape
        h = s.fc(feat)
        ks, vs = [], []
        for j in range(steps):
            e = F.embedding(torch.roll(ids, -(1 + j), 1), emb).to(h.dtype)
            pos = torch.arange(T, device=dev) + j
            x = torch.cat([rms(e, s.n_e), rms(h, s.n_h)], -1)
            q = rope(s.q(x).view(B, T, NH, HD), pos).transpose(1, 2)
            k = rope(s.k(x).view(B, T, NKV, HD), pos).transpose(1, 2).repeat_interleave(G, 1)
            v = s.v(x).view(B, T, NKV, HD).transpose(1, 2).repeat_interleave(G, 1)
            ks.append(k)
            vs.append(v)
            if j == 0:
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                s0 = (q @ ks[0].transpose(-1, -2)).float() * HD**-0.5 + MASK[:T, :T]
                sd = torch.stack([(q * ks[i]).sum(-1).float() * HD**-0.5 for i in range(1, j + 1)], -1)
                w = torch.cat([s0, sd], -1).softmax(-1).to(q.dtype)
                o = w[..., :T] @ vs[0]
                for i in range(1, j + 1):
                    o = o + w[..., T + i - 1 : T + i] * vs[i]
            r = h + s.o(o.transpose(1, 2).reshape(B, T, NH * HD))
            n = rms(r, s.n_p)
            h = r + s.d(F.silu(s.g(n)) * s.u(n))
            yield h


NAMES = {
    "fc.weight": "fc.weight",
    "n_e": "midlayer.input_layernorm.weight",
    "n_h": "midlayer.hidden_norm.weight",
    "n_p": "midlayer.post_attention_layernorm.weight",
    "norm": "norm.weight",
    "head.weight": "lm_head.weight",
}
NAMES |= {f"{x}.weight": f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"} | {
    f"{x}.weight": f"midlayer.mlp.{y}_proj.weight" for x, y in zip("gud", ("gate", "up", "down"))
}
MASK = torch.full((1024, 1024), float("-inf"), device=dev).triu(1)
m = Drafter().to(dev)
if a.resume:
    R = load_file(a.resume)
    keep = R["d2t"] + torch.arange(a.draft_vocab)
    m.load_state_dict({k: R[v].float().to(dev) for k, v in NAMES.items()})
else:
    keep = torch.sort(torch.topk(torch.bincount(data.flatten().long(), minlength=V), a.draft_vocab).indices).values
    with torch.no_grad():
        m.head.weight.copy_(head[keep.to(dev)].float())
kd = keep.to(dev)
slot = torch.full((V,), -1, dtype=torch.long, device=dev)
slot[kd] = torch.arange(a.draft_vocab, device=dev)


@torch.no_grad()
def acceptance(K=6):
    res = {}
    for name, rows in evals.items():
        tokens = cycles = 0
        hits = [0] * K
        tries = [0] * K
        for ids, n in rows:
            ok = []
            with torch.autocast(dev, dtype=torch.bfloat16):
                for j, h in enumerate(m.unroll(ids[None], forward(ids[None])[0], K)):
                    ok.append((kd[m.logits(h)[0].argmax(-1)] == torch.roll(ids, -(2 + j))).cpu())
            stop = (ids[n:] == END).nonzero()
            end = n + int(stop[0]) + 1 if len(stop) else len(ids)
            t = n - 1
            while t + 1 + K < end:
                acc = 0
                while acc < K:
                    tries[acc] += 1
                    if not ok[acc][t]:
                        break
                    hits[acc] += 1
                    acc += 1
                tokens += acc + 1
                cycles += 1
                t += acc + 1
        res[name] = (round(tokens / max(cycles, 1), 3), [round(h / max(q, 1), 3) for h, q in zip(hits, tries)])
    return res


def save():
    sd = {NAMES[k]: v.detach().to(torch.bfloat16).cpu().contiguous() for k, v in m.state_dict().items()}
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[keep] = True
    sd["d2t"] = (keep - torch.arange(a.draft_vocab)).to(torch.int64)
    sd["t2d"] = t2d
    save_file(sd, f"{a.out}/model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": I,
        "num_hidden_layers": 1,
        "num_attention_heads": NH,
        "num_key_value_heads": NKV,
        "head_dim": HD,
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "rope_theta": c["rope_theta"],
        "attention_bias": False,
        "max_position_embeddings": c["max_position_embeddings"],
        "vocab_size": V,
        "draft_vocab_size": a.draft_vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX), "use_aux_hidden_state": True},
    }
    with open(f"{a.out}/config.json", "w") as f:
        f.write(json.dumps(config, indent=2) + "\n")


opt = torch.optim.AdamW(m.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.0)
P0 = pre.numel()
log("before", acceptance())
t0 = last = time.time()
step = at = 0
perm = torch.randperm(len(data))
while (el := time.time() - t0) < a.train_s:
    for g in opt.param_groups:
        g["lr"] = a.lr * min(1, (step + 1) / 100) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * el / a.train_s)))
    if at + a.batch > len(data):
        perm = torch.randperm(len(data))
        at = 0
    ids = data[perm[at : at + a.batch]].long().to(dev)
    at += a.batch
    T = ids.shape[1]
    feat, hid = forward(ids)
    with torch.no_grad():
        full = hid @ head.T
        inside = (slot[full.argmax(-1)] >= 0).float()
        target = full[..., kd].float().softmax(-1).to(torch.bfloat16)
        del full
    loss = 0
    with torch.autocast(dev, dtype=torch.bfloat16):
        for j, h in enumerate(m.unroll(ids, feat, a.steps)):
            rows = slice(P0, T - 1 - j)
            lg = m.logits(h[:, rows]).float()
            w = inside[:, 1 + j :][:, rows]
            ce = torch.logsumexp(lg, -1) - (target[:, 1 + j :][:, rows].float() * lg).sum(-1)
            loss = loss + 0.85**j * (ce * w).sum() / w.sum()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    opt.step()
    step += 1
    if step % 100 == 1:
        log("step", step, "loss", round(loss.item(), 3))
    if time.time() - last > 120:
        last = time.time()
        save()
        log("acceptance", acceptance())
save()
log("steps", step, "final", acceptance())
