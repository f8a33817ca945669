# Trains a GPT-2 that spillway bench wrote, with PyTorch: the same weights, tokens and rates.
# Writes a JSON line a step, as train --metrics does, and "missing" where it can't.
import json
import math
import os
import resource
import sys
import time


def tell(**line):
    print(json.dumps(line), flush=True)


try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F
except ImportError as e:
    tell(missing=f"python3 has no PyTorch: {e}")
    sys.exit(0)


class Layer(nn.Module):
    def __init__(self, width, heads, eps):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        rows, tokens, width = x.shape
        q, k, v = (p.view(rows, tokens, self.heads, -1).transpose(1, 2) for p in self.c_attn(x).split(width, dim=2))
        if hasattr(F, "scaled_dot_product_attention"):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.full((tokens, tokens), -math.inf, device=x.device, dtype=q.dtype).triu(1)
            out = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(width // self.heads) + later, dim=3) @ v
        return self.attn_proj(out.transpose(1, 2).reshape(rows, tokens, width))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(m["vocab"], m["width"]), nn.Embedding(m["positions"], m["width"])
        self.h = nn.ModuleList(Layer(m["width"], m["heads"], m["eps"]) for _ in range(m["layers"]))
        self.ln_f = nn.LayerNorm(m["width"], m["eps"])

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for layer in self.h:
            x = layer(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


# The names that differ from Hugging Face's, and products whose weights lie the other way round there.
RENAMED = {"attn.c_attn": "c_attn", "attn.c_proj": "attn_proj", "mlp.c_fc": "c_fc", "mlp.c_proj": "mlp_proj"}


def load(model, job):
    own = dict(model.named_parameters())
    with open(job["weights"], "rb") as f:
        for w in job["parameters"]:
            name = w["name"].removeprefix("transformer.")
            turned = False
            for theirs, ours in RENAMED.items():
                if "." + theirs + "." in name:
                    name, turned = name.replace(theirs, ours), name.endswith(".weight")
            n = math.prod(w["shape"])
            value = torch.frombuffer(bytearray(f.read(4 * n)), dtype=torch.float32).view(w["shape"])
            with torch.no_grad():
                own.pop(name).copy_(value.t() if turned else value)
    if own:
        raise ValueError(f"no weights for {sorted(own)[:3]}")


def memory(name):
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0


def wrap(model, job):
    """The model and the optimizer by the job's mode; raises Missing where this PyTorch has not got it."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    how = dict(lr=job["lr"][0], betas=(job["beta1"], job["beta2"]), eps=job["eps"])
    if job["mode"].startswith("FSDP2"):
        version = tuple(int(x) for x in torch.__version__.split("+")[0].split("a")[0].split(".")[:2])
        if version < (2, 6):
            raise Missing(f"PyTorch {torch.__version__} has no fully_shard; 2.6 has")
        if job["mode"] == "FSDP2 offload" and job["device"] != "cuda":
            raise Missing("its offload moves a GPU's states to the host, and there is no GPU")
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options = {}
        if job["bf16"]:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if job["mode"] == "FSDP2 offload":
            options["offload_policy"] = CPUOffloadPolicy()
        for layer in model.h:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        return model, torch.optim.AdamW([dict(params=decay, weight_decay=job["weight_decay"]), dict(params=rest, weight_decay=0)], **how)
    net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if job["mode"] == "DDP":
        return net, torch.optim.AdamW([dict(params=decay, weight_decay=job["weight_decay"]), dict(params=rest, weight_decay=0)], **how)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(decay, optimizer_class=torch.optim.AdamW, weight_decay=job["weight_decay"], **how)
    optimizer.add_param_group(dict(params=rest, weight_decay=0))
    return net, optimizer


class Missing(Exception):
    pass


def micro_batch(f, job, step, micro, rank):
    n = job["batch"] * job["seq"]
    f.seek(8 * n * ((step * job["accum"] + micro) * job["ranks"] + rank))
    both = torch.frombuffer(bytearray(f.read(8 * n)), dtype=torch.int32).long().to(job["device"])
    return both.view(2, job["batch"], job["seq"])


def work(rank, job):
    torch.set_num_threads(max(1, job["threads"] // job["ranks"]))
    cuda = job["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", init_method="file://" + job["meet"], rank=rank, world_size=job["ranks"])
    base = memory("VmRSS")
    model = Model(job["model"])
    load(model, job)
    model.to(job["device"])
    try:
        net, optimizer = wrap(model, job)
    except Missing as e:
        if rank == 0:
            tell(missing=str(e))
        return
    sharded = job["mode"].startswith("FSDP2")
    with open(job["samples"], "rb") as f:
        for step in range(len(job["lr"])):
            dist.barrier()
            began = time.perf_counter()
            waited = 0.0
            for group in optimizer.param_groups:
                group["lr"] = job["lr"][step]
            optimizer.zero_grad(set_to_none=True)
            total = torch.zeros((), device=job["device"])
            for micro in range(job["accum"]):
                asked = time.perf_counter()
                tokens, targets = micro_batch(f, job, step, micro, rank)
                waited += time.perf_counter() - asked
                last = micro == job["accum"] - 1
                if not sharded:
                    net.require_backward_grad_sync = last
                with torch.autocast(job["device"], dtype=torch.bfloat16, enabled=job["bf16"] and not sharded):
                    loss = net(tokens, targets)
                (loss * (job["ranks"] / job["targets"][step])).backward()
                total += loss.detach()
            if job["clip"] > 0:
                nn.utils.clip_grad_norm_(model.parameters(), job["clip"])
            optimizer.step()
            dist.all_reduce(total)
            mean = float(total) / job["targets"][step]
            if step == 0:  # its memory is new
                used = resource.getrusage(resource.RUSAGE_SELF)
            if rank == 0:
                tell(step=step + 1, loss=mean, seconds=time.perf_counter() - began, data_wait_s=waited)
    most = torch.tensor([torch.cuda.max_memory_allocated() if cuda else memory("VmHWM") - base], device=job["device"])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if rank == 0:
        now = resource.getrusage(resource.RUSAGE_SELF)
        system, own = now.ru_stime - used.ru_stime, now.ru_utime - used.ru_utime
        faults = (now.ru_minflt - used.ru_minflt) // max(1, len(job["lr"]) - 1)
        tell(event="done", resident_bytes=int(most), system_share=system / max(system + own, 1e-9), page_faults=faults, by="PyTorch " + torch.__version__)
    dist.destroy_process_group()


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        the_job = json.load(file)
    if the_job["device"] == "cuda" and torch.cuda.device_count() < the_job["ranks"]:
        tell(missing=f"PyTorch sees {torch.cuda.device_count()} GPUs, for {the_job['ranks']} ranks")
    else:
        if os.path.exists(the_job["meet"]):
            os.remove(the_job["meet"])
        torch.multiprocessing.spawn(work, (the_job,), nprocs=the_job["ranks"])
