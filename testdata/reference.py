#!/usr/bin/env python3
"""Writes the reference runs of this folder with plain PyTorch: small random
checkpoints in the Hugging Face layout, text.bin (text.txt, one byte a token,
uint16), losses.json with the losses of 20 AdamW steps for each case, and
bf16.json with those of 50 steps under bf16 autocast and in fp32.

usage: python3 reference.py        (needs torch and numpy; about a minute)

The order of tokens, and AdamW's defaults, are those of `spillway train`. The
model is plain: attention materialised, no fused operation. A run over W ranks
with K micro-batches is computed as one process: the gradient of the mean loss
over the global batch.
"""
import json, math, os, pathlib, struct, sys
import numpy as np
import torch, torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
torch.manual_seed(0); torch.set_num_threads(1)

def write_safetensors(path, tensors):
    head, off = {"__metadata__": {"format": "pt"}}, 0
    for k, v in tensors.items():
        head[k] = {"dtype": "F32", "shape": list(v.shape), "data_offsets": [off, off + 4 * v.numel()]}; off += 4 * v.numel()
    h = json.dumps(head).encode(); h += b" " * (-len(h) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(h))); f.write(h)
        for v in tensors.values(): f.write(v.detach().contiguous().numpy().tobytes())

def attend(q, k, v):  # (B,H,T,D)
    T = q.shape[2]; a = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    return (a.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)) @ v

def gpt2_config(): return dict(model_type="gpt2", n_layer=2, n_head=2, n_embd=32, vocab_size=256, n_positions=64,
                               activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True)
def gpt2_weights(c, g):
    C, n = c["n_embd"], lambda *s, std=0.02: torch.randn(*s, generator=g) * std
    w = {"wte.weight": n(c["vocab_size"], C), "wpe.weight": n(c["n_positions"], C, std=0.01)}
    for i in range(c["n_layer"]):
        h = f"h.{i}."
        for ln in ("ln_1", "ln_2"): w[h + ln + ".weight"] = 1 + n(C); w[h + ln + ".bias"] = n(C)
        for name, o, r in (("attn.c_attn", 3*C, C), ("attn.c_proj", C, C), ("mlp.c_fc", 4*C, C), ("mlp.c_proj", C, 4*C)):
            w[h + name + ".weight"] = n(r, o); w[h + name + ".bias"] = n(o)
    w["ln_f.weight"] = 1 + n(C); w["ln_f.bias"] = n(C)
    return w
def gpt2_logits(c, w, x):
    C, H = c["n_embd"], c["n_head"]; B, T = x.shape
    ln = lambda h, p: F.layer_norm(h, (C,), w[p + ".weight"], w[p + ".bias"], c["layer_norm_epsilon"])
    lin = lambda h, p: h @ w[p + ".weight"] + w[p + ".bias"]
    h = w["wte.weight"][x] + w["wpe.weight"][:T]
    for i in range(c["n_layer"]):
        p = f"h.{i}."
        q, k, v = lin(ln(h, p + "ln_1"), p + "attn.c_attn").view(B, T, 3, H, C//H).permute(2, 0, 3, 1, 4)
        h = h + lin(attend(q, k, v).transpose(1, 2).reshape(B, T, C), p + "attn.c_proj")
        h = h + lin(F.gelu(lin(ln(h, p + "ln_2"), p + "mlp.c_fc"), approximate="tanh"), p + "mlp.c_proj")
    return ln(h, "ln_f") @ w["wte.weight"].t()

def llama_config(tied, **more): return dict(model_type="llama", hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=tied) | more
# Llama's relatives: heads whose width is not hidden_size / heads; biases of q, k, v; norms of
# queries and keys by head (qwen3) or over all heads (olmo2), which norms after and not before.
relatives = {
    "mistral": llama_config(False, model_type="mistral", head_dim=12, sliding_window=None, rope_theta=1e6),
    "qwen2": llama_config(True, model_type="qwen2", use_sliding_window=False, rope_theta=1e6),
    "qwen3": llama_config(True, model_type="qwen3", head_dim=16, attention_bias=False, use_sliding_window=False),
    "olmo2": llama_config(False, model_type="olmo2", num_key_value_heads=4, rope_theta=5e5),
    "smollm": llama_config(True, hidden_size=36, num_attention_heads=3, num_key_value_heads=1, rope_theta=1e5),
}
def head_dim(c): return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
def llama_weights(c, g):
    C, I, D, kind = c["hidden_size"], c["intermediate_size"], head_dim(c), c["model_type"]
    n = lambda *s, std=0.05: torch.randn(*s, generator=g) * std
    w = {"model.embed_tokens.weight": n(c["vocab_size"], C)}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        kv, qd = c["num_key_value_heads"] * D, c["num_attention_heads"] * D
        for name, o, r in (("self_attn.q_proj", qd, C), ("self_attn.k_proj", kv, C), ("self_attn.v_proj", kv, C), ("self_attn.o_proj", C, qd),
                           ("mlp.gate_proj", I, C), ("mlp.up_proj", I, C), ("mlp.down_proj", C, I)):
            w[p + name + ".weight"] = n(o, r)
        for ln in ("post_attention_layernorm", "post_feedforward_layernorm") if kind == "olmo2" else ("input_layernorm", "post_attention_layernorm"): w[p + ln + ".weight"] = 1 + n(C)
        if kind == "qwen2":
            for name, o in (("q_proj", qd), ("k_proj", kv), ("v_proj", kv)): w[p + f"self_attn.{name}.bias"] = n(o)
        if kind in ("qwen3", "olmo2"):
            for name, o in (("q_norm", qd), ("k_norm", kv)): w[p + f"self_attn.{name}.weight"] = 1 + n(D if kind == "qwen3" else o)
    w["model.norm.weight"] = 1 + n(C)
    if not c["tie_word_embeddings"]: w["lm_head.weight"] = n(c["vocab_size"], C)
    return w
def llama_logits(c, w, x):
    C, H, KV, kind = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["model_type"]; D = head_dim(c); B, T = x.shape
    post = kind == "olmo2"
    def rms(h, p): return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]) * w[p + ".weight"]
    inv = 1.0 / (c["rope_theta"] ** (torch.arange(0, D, 2).float() / D)); ang = torch.arange(T).float()[:, None] * inv[None]
    cos, sin = torch.cat([ang, ang], -1).cos(), torch.cat([ang, ang], -1).sin()
    def rope(t): return t * cos + torch.cat([-t[..., D//2:], t[..., :D//2]], -1) * sin
    h = w["model.embed_tokens.weight"][x]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."; a = h if post else rms(h, p + "input_layernorm")
        def heads(name, n):
            y = a @ w[p + f"self_attn.{name}.weight"].t()
            if kind == "qwen2": y = y + w[p + f"self_attn.{name}.bias"]
            norm = p + f"self_attn.{name[0]}_norm"
            if post and name != "v_proj": y = rms(y, norm)
            y = y.view(B, T, n, D)
            if kind == "qwen3" and name != "v_proj": y = rms(y, norm)
            return y.transpose(1, 2)
        q, k, v = rope(heads("q_proj", H)), rope(heads("k_proj", KV)), heads("v_proj", KV)
        k, v = (t.repeat_interleave(H // KV, 1) for t in (k, v))
        y = attend(q, k, v).transpose(1, 2).reshape(B, T, H * D) @ w[p + "self_attn.o_proj.weight"].t()
        h = h + (rms(y, p + "post_attention_layernorm") if post else y)
        a = h if post else rms(h, p + "post_attention_layernorm")
        y = (F.silu(a @ w[p + "mlp.gate_proj.weight"].t()) * (a @ w[p + "mlp.up_proj.weight"].t())) @ w[p + "mlp.down_proj.weight"].t()
        h = h + (rms(y, p + "post_feedforward_layernorm") if post else y)
    return rms(h, "model.norm") @ w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"].t()

def run(c, w, logits, tok, W=1, K=1, clip=0.0, B=2, T=40, steps=20, lr=1e-3, half=False):
    w = {k: torch.nn.Parameter(v.clone()) for k, v in w.items()}
    groups = [{"params": [p for p in w.values() if p.ndim >= 2], "weight_decay": 0.1}, {"params": [p for p in w.values() if p.ndim < 2], "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8); span = (len(tok) - 1) // T * T; losses = []
    for s in range(steps):
        st = [(((s*K + k)*W + r)*B + b)*T % span for k in range(K) for r in range(W) for b in range(B)]
        x = torch.tensor(np.stack([tok[i:i+T] for i in st]).astype(np.int64)); y = torch.tensor(np.stack([tok[i+1:i+T+1] for i in st]).astype(np.int64))
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half): out = logits(c, w, x)
        loss = F.cross_entropy(out.float().view(-1, 256), y.view(-1)); loss.backward()
        if clip: torch.nn.utils.clip_grad_norm_(list(w.values()), clip)
        opt.step(); losses.append(float(loss))
    return losses

def main():
    tok = np.frombuffer((HERE / "text.txt").read_bytes(), np.uint8).astype("<u2"); tok.tofile(HERE / "text.bin")
    out = {"made_by": f"python3 reference.py, PyTorch {torch.__version__}", "batch": 2, "seq": 40, "lr": 1e-3, "cases": []}
    models = {"gpt2": (gpt2_config(), gpt2_weights, gpt2_logits), "llama-tied": (llama_config(True), llama_weights, llama_logits), "llama-untied": (llama_config(False), llama_weights, llama_logits)}
    half = {"made_by": out["made_by"], "batch": 2, "seq": 40, "lr": 1e-3, "cases": []}
    for name, (c, make, logits) in models.items():
        w = make(c, torch.Generator().manual_seed(1)); curve = lambda half: [round(v, 6) for v in run(c, w, logits, tok, steps=50, half=half)]
        half["cases"].append({"model": name, "bf16": curve(True), "fp32": curve(False)})
    (HERE / "bf16.json").write_text(json.dumps(half) + "\n")
    models |= {name: (c, llama_weights, llama_logits) for name, c in relatives.items()}
    for name, (c, make, logits) in models.items():
        w = make(c, torch.Generator().manual_seed(1)); d = HERE / name; d.mkdir(exist_ok=True)
        (d / "config.json").write_text(json.dumps(c, indent=2) + "\n"); write_safetensors(d / "model.safetensors", w)
        for W, K, clip in ((1, 1, 0.0), (2, 2, 0.5)) if name in relatives else ((1, 1, 0.0), (2, 1, 0.0), (4, 1, 0.5), (1, 3, 0.5), (2, 2, 0.0), (4, 2, 0.5)):
            out["cases"].append({"model": name, "ranks": W, "accum": K, "clip": clip, "losses": run(c, w, logits, tok, W, K, clip)})
    (HERE / "losses.json").write_text(json.dumps(out, indent=1) + "\n")

if __name__ == "__main__": main()
