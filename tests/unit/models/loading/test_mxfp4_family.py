"""gpt-oss from MXFP4 blocks, as it is published, against transformers with the same numbers."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.loading.loader import load_model
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import transformers_logits, write_checkpoint

TOKEN_IDS = [5, 96, 0, 48, 49, 17, 33, 80, 2, 61]


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


def test_mxfp4_experts_give_the_logits_of_transformers(tmp_path):
    reference = write_checkpoint(tmp_path, "gpt_oss", intermediate_size=64)
    pack_experts(tmp_path, reference)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    runner = PagedRunner(model)
    logits = runner.run(runner.add(TOKEN_IDS), chunk_size=4)
    expected = transformers_logits(reference, TOKEN_IDS)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
