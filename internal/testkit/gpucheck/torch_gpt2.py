#!/usr/bin/env python3
"""PyTorch's side of gpucheck: GPT-2 trained as `spillway train` does it.

Reads config.json, and model.safetensors unless --random, of a folder in Hugging
Face's layout, and raw uint16 tokens. Row b of step s starts at token
(s*B + b)*T modulo (length - 1) // T * T. AdamW: betas 0.9 and 0.95, eps 1e-8,
weight decay 0.1 on matrices. Prints a JSON line a step.
"""
import argparse
import json
import pathlib
import struct
import time

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x):
        rows, length, width = x.shape
        split = (rows, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # PyTorch 1
            scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
            ahead = torch.ones(length, length, device=x.device).triu(1).bool()
            y = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(rows, length, width))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, width, heads, eps):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps)
        self.mlp = MLP(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Parameters have Hugging Face's names, so that a checkpoint needs no table."""

    def __init__(self, config):
        super().__init__()
        width, eps = config["n_embd"], config["layer_norm_epsilon"]
        self.wte = nn.Embedding(config["vocab_size"], width)
        self.wpe = nn.Embedding(config["n_positions"], width)
        self.h = nn.ModuleList(Layer(width, config["n_head"], eps) for _ in range(config["n_layer"]))
        self.ln_f = nn.LayerNorm(width, eps)

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe.weight[: inputs.shape[1]]
        for layer in self.h:
            x = layer(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def load(model, path):
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    head = json.loads(raw[8 : 8 + size])
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, about in head.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + size + at for at in about["data_offsets"])
            value = torch.frombuffer(bytearray(raw[begin:end]), dtype=torch.float32).view(about["shape"])
            # Hugging Face keeps the products of GPT-2 as (in, out).
            turned = len(about["shape"]) == 2 and not name.startswith(("wte", "wpe"))
            parameters.pop(name).copy_(value.t() if turned else value)
    assert not parameters, f"not in the checkpoint: {sorted(parameters)}"


def main():
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--model", type=pathlib.Path, required=True)
    ask.add_argument("--data", required=True)
    ask.add_argument("--device", default="cuda")
    ask.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    for name, default in (("steps", 10), ("batch", 4), ("seq", 256)):
        ask.add_argument("--" + name, type=int, default=default)
    ask.add_argument("--lr", type=float, default=1e-3)
    ask.add_argument("--random", action="store_true")
    ask.add_argument("--compile", action="store_true")
    a = ask.parse_args()

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(1)
    model = GPT2(json.loads((a.model / "config.json").read_text())).to(a.device)
    if a.dtype == "bf16":  # weights and states too: autocast over fp32 weights would be slower
        model = model.to(torch.bfloat16)
    if a.random:
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
    else:
        load(model, a.model / "model.safetensors")
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    options = {"fused": True} if a.device == "cuda" else {}
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=a.lr, betas=(0.9, 0.95), eps=1e-8, **options,
    )
    step = torch.compile(model) if a.compile else model

    text = pathlib.Path(a.data).read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.int16).to(torch.int64) & 0xFFFF
    span = (len(tokens) - 1) // a.seq * a.seq
    for s in range(a.steps):
        began = time.perf_counter()
        starts = [(s * a.batch + b) * a.seq % span for b in range(a.batch)]
        inputs = torch.stack([tokens[i : i + a.seq] for i in starts]).to(a.device)
        targets = torch.stack([tokens[i + 1 : i + a.seq + 1] for i in starts]).to(a.device)
        optimizer.zero_grad(set_to_none=True)
        loss = step(inputs, targets)
        loss.backward()
        optimizer.step()
        value = loss.item()  # waits for the device
        print(json.dumps({"step": s + 1, "loss": value, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
