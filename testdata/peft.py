#!/usr/bin/env python3
"""Writes peft/: adapters in the layout of Hugging Face's PEFT, and logits of the models with
them, in PyTorch.

usage: python3 peft.py        (needs torch and numpy; after reference.py)

The layout is that of PEFT's documentation, "PEFT checkpoint format"
(huggingface.co/docs/peft/developer_guides/checkpoint): adapter_config.json with the keys shown
there, adapter_model.safetensors with base_model.model.MODULE.lora_A.weight (r, in) and
lora_B.weight (out, r), where MODULE is the module's path in transformers' model. One config has
the keys that the page calls the minimum, beside the base: r and lora_alpha are PEFT's defaults, 8.
"""
import json
import numpy as np
import torch
import reference as ref

PROMPT = list(b"func main() {\n")

def full(base, r, alpha, targets, conv1d):
    return {"alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": base, "bias": "none", "fan_in_fan_out": conv1d,
            "inference_mode": True, "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
            "loftq_config": {}, "lora_alpha": alpha, "lora_dropout": 0.05, "megatron_config": None, "megatron_core": "megatron.core",
            "modules_to_save": None, "peft_type": "LORA", "r": r, "rank_pattern": {}, "revision": None, "target_modules": targets,
            "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False}

cases = {  # model: its functions, targets, module path before the layer, r, alpha, config
    "gpt2": (ref.gpt2_config(), ref.gpt2_weights, ref.gpt2_logits, ["c_attn", "c_fc"], "transformer.", 4, 12,
             full("../../gpt2", 4, 12, ["c_attn", "c_fc"], True)),
    "llama-tied": (ref.llama_config(True), ref.llama_weights, ref.llama_logits, ["q_proj", "v_proj", "down_proj"], "", 8, 8,
                   {"base_model_name_or_path": "../../llama-tied", "target_modules": ["q_proj", "v_proj", "down_proj"], "peft_type": "LORA"}),
}

def main():
    g, expected = torch.Generator().manual_seed(7), {}
    for name, (c, make, logits, targets, within, r, alpha, config) in cases.items():
        w = make(c, torch.Generator().manual_seed(1))
        tensors, adapted = {}, dict(w)
        for weight, v in w.items():
            layer = weight.removesuffix(".weight")
            if layer == weight or layer.split(".")[-1] not in targets: continue
            out, inner = v.shape[::-1] if config.get("fan_in_fan_out") else v.shape
            a, b = torch.randn(r, inner, generator=g) * 0.3, torch.randn(out, r, generator=g) * 0.3
            tensors[f"base_model.model.{within}{layer}.lora_A.weight"] = a
            tensors[f"base_model.model.{within}{layer}.lora_B.weight"] = b
            d = alpha / r * (b @ a)
            adapted[weight] = v + (d.t() if config.get("fan_in_fan_out") else d)
        folder = ref.HERE / "peft" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        ref.write_safetensors(folder / "adapter_model.safetensors", tensors)
        x = torch.tensor([PROMPT])
        last = lambda w: [round(float(v), 6) for v in logits(c, w, x)[0, -1]]
        expected[name] = {"adapted": last(adapted), "base": last(w)}
    doc = {"made_by": f"python3 peft.py, PyTorch {torch.__version__}", "prompt": PROMPT, "logits": expected}
    (ref.HERE / "peft" / "logits.json").write_text(json.dumps(doc) + "\n")

main()
