"""Writes gemma2.json: the logits of a small Gemma 2 as PyTorch computes them in float64
from the published architecture (Gemma Team 2024, arXiv:2408.00118, and the names, shapes
and order of operations of transformers' Gemma2ForCausalLM). Run it where torch is:

    python3 model/testdata/gemma2.py > model/testdata/gemma2.json
"""
import json
import math
import sys

import torch

CONFIG = {
    "model_type": "gemma2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 23,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 5,
    "sliding_window": 3, "hidden_activation": "gelu_pytorch_tanh",
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def shapes(c):
    """The tensors, in the order in which their values are drawn."""
    w, f, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    yield "model.embed_tokens.weight", (c["vocab_size"], w)
    for i in range(c["num_hidden_layers"]):
        h = f"model.layers.{i}."
        yield h + "input_layernorm.weight", (w,)
        yield h + "self_attn.q_proj.weight", (q, w)
        yield h + "self_attn.k_proj.weight", (kv, w)
        yield h + "self_attn.v_proj.weight", (kv, w)
        yield h + "self_attn.o_proj.weight", (w, q)
        yield h + "post_attention_layernorm.weight", (w,)
        yield h + "pre_feedforward_layernorm.weight", (w,)
        yield h + "mlp.gate_proj.weight", (f, w)
        yield h + "mlp.up_proj.weight", (f, w)
        yield h + "mlp.down_proj.weight", (w, f)
        yield h + "post_feedforward_layernorm.weight", (w,)
    yield "model.norm.weight", (w,)


def value(k, i):
    """Element i of tensor k, in [-0.75, 0.75): the Go test has the same rule."""
    x = (i * 2654435761 + k * 40503 + 12345) % 2**32
    x = (x * 2246822519 + 3266489917) % 2**32
    return (x / 2**32 - 0.5) * 1.5


def weights(c):
    out = {}
    for k, (name, shape) in enumerate(shapes(c)):
        n = math.prod(shape)
        out[name] = torch.tensor([value(k, i) for i in range(n)], dtype=torch.float64).reshape(shape)
    return out


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


def rotate(x, theta):  # (T, heads, D)
    t, _, d = x.shape
    freq = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.outer(torch.arange(t, dtype=torch.float64), freq)
    angle = torch.cat((angle, angle), -1)[:, None, :]
    half = torch.cat((-x[..., d // 2:], x[..., : d // 2]), -1)
    return x * angle.cos() + half * angle.sin()


def cap(x, limit):
    return limit * torch.tanh(x / limit)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(c, w, tokens):
    t, d, eps = len(tokens), c["head_dim"], c["rms_norm_eps"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    x = w["model.embed_tokens.weight"][torch.tensor(tokens)] * math.sqrt(c["hidden_size"])
    row, col = torch.arange(t)[:, None], torch.arange(t)[None, :]
    for i in range(c["num_hidden_layers"]):
        p = lambda name: w[f"model.layers.{i}.{name}.weight"]
        a = norm(x, p("input_layernorm"), eps)
        q = rotate((a @ p("self_attn.q_proj").T).reshape(t, heads, d), c["rope_theta"])
        k = rotate((a @ p("self_attn.k_proj").T).reshape(t, kv, d), c["rope_theta"])
        v = (a @ p("self_attn.v_proj").T).reshape(t, kv, d)
        k, v = (y.repeat_interleave(heads // kv, 1) for y in (k, v))
        s = torch.einsum("thd,shd->hts", q, k) * c["query_pre_attn_scalar"] ** -0.5
        s = cap(s, c["attn_logit_softcapping"])
        hidden = col > row
        if i % 2 == 0:
            hidden = hidden | (col <= row - c["sliding_window"])
        s = s.masked_fill(hidden, float("-inf")).softmax(-1)
        a = torch.einsum("hts,shd->thd", s, v).reshape(t, heads * d)
        x = x + norm(a @ p("self_attn.o_proj").T, p("post_attention_layernorm"), eps)
        a = norm(x, p("pre_feedforward_layernorm"), eps)
        a = gelu(a @ p("mlp.gate_proj").T) * (a @ p("mlp.up_proj").T)
        x = x + norm(a @ p("mlp.down_proj").T, p("post_feedforward_layernorm"), eps)
    x = norm(x, w["model.norm.weight"], eps)
    return cap(x @ w["model.embed_tokens.weight"].T, c["final_logit_softcapping"])


if __name__ == "__main__":
    out = logits(CONFIG, weights(CONFIG), TOKENS)
    json.dump({"config": CONFIG, "tokens": TOKENS, "torch": torch.__version__, "logits": out.tolist()}, sys.stdout, indent=1)
    print()
