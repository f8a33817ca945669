"""PyTorch's causal attention, forward and backward, for the attention benchmark.

peer.py block|contiguous B T H D THREADS FOLDER

block: as a GPT-2 block has it, on a packed (B, T, 3·H·D) qkv. contiguous: q, k,
v (B, H, T, D) as leaves, and the mask made beforehand. FOLDER holds qkv.bin and
dy.bin, (B, T, 3·H·D) and (B, T, H·D) float32; y.bin and dqkv.bin are written
there. Then each line on stdin runs the attention twice and prints the seconds
of the second.
"""
import math, os, sys, time

for k in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(k, None)  # let OpenBLAS choose for this CPU
import numpy as np
import torch

layout = sys.argv[1]
B, T, H, D = map(int, sys.argv[2:6])
threads, folder = int(sys.argv[6]), sys.argv[7]
torch.set_num_threads(threads)
load = lambda name, width: torch.from_numpy(np.fromfile(os.path.join(folder, name), np.float32).reshape(B, T, width))
x, dy = load("qkv.bin", 3 * H * D).requires_grad_(), load("dy.bin", H * D)


def attention(q, k, v, mask):
    a = (q @ k.transpose(-2, -1)) / math.sqrt(D)
    return a.masked_fill(mask, float("-inf")).softmax(-1) @ v


def block():
    x.grad = None
    t = time.perf_counter()
    q, k, v = x.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
    y = attention(q, k, v, torch.ones(T, T, dtype=torch.bool).triu(1)).transpose(1, 2).reshape(B, T, H * D)
    y.backward(dy)
    return time.perf_counter() - t, y, x.grad


leaves = [p.detach().clone().contiguous().requires_grad_() for p in x.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)]
heads_dy = dy.view(B, T, H, D).transpose(1, 2).contiguous()
mask = torch.ones(T, T, dtype=torch.bool).triu(1)


def contiguous():
    for p in leaves:
        p.grad = None
    t = time.perf_counter()
    y = attention(*leaves, mask)
    y.backward(heads_dy)
    t = time.perf_counter() - t
    grad = torch.stack([p.grad for p in leaves]).permute(1, 3, 0, 2, 4).reshape(B, T, 3 * H * D)
    return t, y.transpose(1, 2).reshape(B, T, H * D), grad


run = {"block": block, "contiguous": contiguous}[layout]
_, y, grad = run()
y.detach().numpy().tofile(os.path.join(folder, "y.bin"))
grad.numpy().tofile(os.path.join(folder, "dqkv.bin"))
print("PyTorch", torch.__version__, flush=True)
for _ in sys.stdin:
    run()
    print(run()[0], flush=True)
