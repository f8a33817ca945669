#!/usr/bin/env python3
"""Writes muon.json: the losses of 20 steps of a plain Muon in PyTorch on the checkpoints of
this folder.

usage: python3 muon.py        (needs torch and numpy; after reference.py)

Muon updates the 2-D weights of the blocks; AdamW updates the rest with the same rate.
"""
import json, math
import numpy as np
import torch, torch.nn.functional as F
import reference as ref

STEPS, DECAY = 20, 0.1

def newtonschulz(g):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    if x.shape[0] > x.shape[1]: x = x.T
    for _ in range(5):
        A = x @ x.T
        x = a * x + (b * A + c * A @ A) @ x
    return x.T if g.shape[0] > g.shape[1] else x

def run(c, w, logits, tok, lr, B=2, T=40):
    w = {k: torch.nn.Parameter(v.clone()) for k, v in w.items()}
    muon = [v for k, v in w.items() if v.ndim == 2 and (k.startswith("h.") or ".layers." in k)]
    rest = [v for v in w.values() if not any(v is m for m in muon)]
    adamw = torch.optim.AdamW([{"params": [v for v in rest if v.ndim > 1], "weight_decay": DECAY},
                               {"params": [v for v in rest if v.ndim < 2], "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95), eps=1e-8)
    moments = [torch.zeros_like(v) for v in muon]
    span, losses = (len(tok) - 1) // T * T, []
    for s in range(STEPS):
        st = [(s*B + b)*T % span for b in range(B)]
        x, y = (torch.tensor(np.stack([tok[i+d:i+d+T] for i in st]).astype(np.int64)) for d in (0, 1))
        for v in w.values(): v.grad = None
        loss = F.cross_entropy(logits(c, w, x).view(-1, 256), y.view(-1)); loss.backward()
        adamw.step()
        with torch.no_grad():
            for v, m in zip(muon, moments):
                m.mul_(0.95).add_(v.grad)
                v.sub_(lr * (0.2 * math.sqrt(max(v.shape)) * newtonschulz(v.grad + 0.95 * m) + DECAY * v))
        losses.append(float(loss))
    return losses

def main():
    tok = np.frombuffer((ref.HERE / "text.txt").read_bytes(), np.uint8)
    models = {"gpt2": (ref.gpt2_config(), ref.gpt2_weights, ref.gpt2_logits),
              "llama-tied": (ref.llama_config(True), ref.llama_weights, ref.llama_logits),
              "llama-untied": (ref.llama_config(False), ref.llama_weights, ref.llama_logits)}
    out = {"made_by": f"python3 muon.py, PyTorch {torch.__version__}", "cases": []}
    for name, (c, make, logits) in models.items():
        for lr in (1e-3, 1e-2):
            w = make(c, torch.Generator().manual_seed(1))
            out["cases"].append({"model": name, "lr": lr, "losses": [round(v, 6) for v in run(c, w, logits, tok, lr)]})
    (ref.HERE / "muon.json").write_text(json.dumps(out, indent=1) + "\n")

main()
