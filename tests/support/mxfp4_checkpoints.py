"""gpt-oss checkpoints with random MXFP4 experts, as they are published."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def pack_experts(folder, model) -> None:
    """Gives a checkpoint and transformers' model of it the same random MXFP4 experts."""
    tensors, parameters = load_file(folder / "model.safetensors"), model.state_dict()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, dtype=torch.uint8)
        parameters[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
