#!/usr/bin/env python3
"""Writes lora.json: the losses of 20 AdamW steps of a plain LoRA in PyTorch on the
checkpoints of this folder, for several ranks r.

usage: python3 lora.py        (needs torch and numpy; after reference.py)

An adapter adds (alpha/r)·x·Aᵀ·Bᵀ to a product. A begins with the values of `first`, B at
zero; everything else is frozen.
"""
import fnmatch, json, math
import numpy as np
import torch, torch.nn.functional as F
import reference as ref

ALPHA, STEPS, LR = 16.0, 20, 1e-3

def first(r, k):  # element i of A, the same in the test
    i = np.arange(r * k, dtype=np.float64)
    return torch.tensor((((i * 7919) % 1009) / 1009 * 2 - 1) / math.sqrt(k), dtype=torch.float32).view(r, k)

def run(c, w, logits, tok, r, targets, B=2, T=40):
    gpt2, adapters = c["model_type"] == "gpt2", {}
    for name, v in w.items():
        if v.ndim == 2 and any(fnmatch.fnmatchcase(name, t) for t in targets):
            n, k = v.shape[::-1] if gpt2 else v.shape  # Conv1D's weight is (in, out)
            adapters[name] = torch.nn.Parameter(first(r, k)), torch.nn.Parameter(torch.zeros(n, r))
    opt = torch.optim.AdamW([p for ab in adapters.values() for p in ab], lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    span, losses = (len(tok) - 1) // T * T, []
    for s in range(STEPS):
        st = [(s*B + b)*T % span for b in range(B)]
        x, y = (torch.tensor(np.stack([tok[i+d:i+d+T] for i in st]).astype(np.int64)) for d in (0, 1))
        with_adapters = dict(w)
        for name, (a, b) in adapters.items():
            d = ALPHA / r * (b @ a)
            with_adapters[name] = w[name] + (d.t() if gpt2 else d)
        opt.zero_grad()
        loss = F.cross_entropy(logits(c, with_adapters, x).view(-1, 256), y.view(-1)); loss.backward()
        opt.step(); losses.append(float(loss))
    return losses

def main():
    tok = np.frombuffer((ref.HERE / "text.txt").read_bytes(), np.uint8)
    models = {"gpt2": (ref.gpt2_config(), ref.gpt2_weights, ref.gpt2_logits, ["*.attn.*", "*.mlp.*"]),
              "llama-tied": (ref.llama_config(True), ref.llama_weights, ref.llama_logits, ["*_proj.weight"]),
              "llama-untied": (ref.llama_config(False), ref.llama_weights, ref.llama_logits, ["*.q_proj.*", "*.v_proj.*"])}
    out = {"made_by": f"python3 lora.py, PyTorch {torch.__version__}", "alpha": ALPHA, "lr": LR, "cases": []}
    for name, (c, make, logits, targets) in models.items():
        w = make(c, torch.Generator().manual_seed(1))
        for r in (1, 8, 64):
            out["cases"].append({"model": name, "r": r, "targets": targets, "losses": [round(v, 6) for v in run(c, w, logits, tok, r, targets)]})
    (ref.HERE / "lora.json").write_text(json.dumps(out, indent=1) + "\n")

main()
