"""Gradient error of int8 products by the size of their blocks along K.

An emulation in PyTorch, on the CPU, of one step of two small models: values are
rounded to bf16 as in a bf16 run, linears quantise both factors to int8 with a scale a
row (and block of K), and the gradients are compared with float64's. No part of
Spillway is used. Run: python3 benchmarks/int8/blocks.py  (torch 1.13, 2 minutes)
"""
import torch

torch.set_num_threads(1)
W, HEADS, LAYERS, T, B, V = 128, 4, 4, 40, 4, 256


def rounded(x, to):
    return x if to is None else x.to(to).to(x.dtype)


def quantised(x, block):
    """x, of which the last dimension is K, after a rest in int8."""
    if not block:
        return x
    k = x.shape[-1]
    pad = -k % min(block, k)
    y = torch.nn.functional.pad(x, (0, pad)).unflatten(-1, (-1, min(block, k)))
    scale = y.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((y / scale).round() * scale).flatten(-2)[..., :k]


class Linear(torch.autograd.Function):
    """y = x wT; fwd and bwd are the blocks of the product and of the input's gradient."""

    @staticmethod
    def forward(ctx, x, w, half, fwd, bwd):
        ctx.save_for_backward(x, w)
        ctx.half, ctx.bwd = half, bwd
        return rounded(quantised(x, fwd) @ quantised(w, fwd).T, half)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = rounded(dy, ctx.half)
        dx = quantised(dy, ctx.bwd) @ quantised(w.T.contiguous(), ctx.bwd).T
        dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
        return rounded(dx, ctx.half), rounded(dw, ctx.half), None, None, None


def gradients(model, half, fwd, bwd):
    torch.manual_seed(1)
    dtype = torch.float64
    shapes = {"qkv": (3 * W, W), "o": (W, W), "up": (4 * W, W), "down": (W, 4 * W), "gate": (4 * W, W)}
    p = {f"{i}.{n}": (0.02 * torch.randn(s, dtype=dtype)) for i in range(LAYERS) for n, s in shapes.items()}
    p["wte"], p["head"] = 0.02 * torch.randn(V, W, dtype=dtype), 0.02 * torch.randn(V, W, dtype=dtype)
    p = {n: rounded(v, torch.bfloat16).requires_grad_() for n, v in p.items()}
    tokens = torch.randint(0, V, (B, T + 1))
    r = lambda x: rounded(x, half) if half is None else x + (rounded(x, half) - x).detach()
    lin = lambda x, n: Linear.apply(x, p[n], half, fwd, bwd)

    def norm(x):
        x = x - x.mean(-1, keepdim=True) if model == "gpt2" else x
        return r(x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())

    mask = torch.full((T, T), float("-inf"), dtype=dtype).triu(1)
    x = p["wte"][tokens[:, :-1]]
    for i in range(LAYERS):
        q, k, v = lin(norm(x), f"{i}.qkv").unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        a = r(((q @ k.transpose(-1, -2)) / (W / HEADS) ** 0.5 + mask).softmax(-1) @ v)
        x = r(x + lin(a.transpose(1, 2).flatten(2), f"{i}.o"))
        h = norm(x)
        if model == "gpt2":
            h = r(torch.nn.functional.gelu(lin(h, f"{i}.up")))
        else:
            h = r(torch.nn.functional.silu(lin(h, f"{i}.gate")) * lin(h, f"{i}.up"))
        x = r(x + lin(h, f"{i}.down"))
    logits = Linear.apply(norm(x), p["head"], half, 0, 0)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return torch.cat([v.grad.flatten() for n, v in sorted(p.items()) if v.grad is not None])


if __name__ == "__main__":
    half = torch.bfloat16
    for model in ("gpt2", "llama"):
        exact = gradients(model, None, 0, 0)
        off = lambda g: ((g - exact).norm() / exact.norm()).item()
        plain = off(gradients(model, half, 0, 0))
        print(f"{model}: bf16 {plain:.2e}")
        for fwd, bwd in ((4096, 4096), (128, 128), (64, 64), (32, 32), (16, 16), (4096, 0), (0, 4096), (64, 0), (32, 0)):
            e = off(gradients(model, half, fwd, bwd))
            print(f"  forward's blocks {fwd:4d}, input gradient's {bwd:4d}: {e:.2e}, {e / plain:.2f} x bf16")
