"""Checkpoints with FP8 weights, as public tools write them, and their dequantised weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.loading.checkpoint import SINGLE_FILE

BLOCK = 128
FP8 = torch.float8_e4m3fn
LAYER_FORMS = (
    "awq", "gptq-act-order", "compressed-int4-channel", "modelopt-nvfp4", "quark-mxfp4",
    "gptq-8-bit", "compressed-int8",
)  # fmt: skip
"""Formats of scripts.quantize_tiny whose layers stay packed on Hopper, one of each kind."""

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""A shape whose projections begin at whole blocks."""
WIDE_EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 4},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "v_head_dim": 64, "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
    },
}  # fmt: skip
"""The same of families with experts, besides."""
_DELTA_NET = {
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 64}
_NEMOTRON = {"mamba_num_heads": 16, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 64}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 64, "moe_intermediate_size": 128, "num_local_experts": 8,
}  # fmt: skip
_SHARED = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256, "num_experts": 4}
WIDE_STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA_NET | _SHARED,
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": _DELTA_NET | _SHARED,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON | {
        "moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 256,
        "moe_latent_size": 128,
    },
    "granite_hybrid": _MAMBA2 | {"intermediate_size": 128, "shared_intermediate_size": 256},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 512},
    "olmo_hybrid": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 64,
    },
    "kimi_linear": _LATENT | {"linear_num_heads": 2, "linear_head_dim": 128},
    "bailing_hybrid": _LATENT,
    "lfm2": {"block_multiple_of": 128},
    "lfm2_moe": {"moe_intermediate_size": 128, "num_experts": 4},
    "minimax": {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
        "num_local_experts": 4,
    },
    "mamba2": {"num_heads": 16, "head_dim": 32, "state_size": 64},
}  # fmt: skip
"""Fields of the configs of families with states, so that blocks and groups fit."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("block", {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "per_tensor": ("tensor", {"quant_method": "fp8", "activation_scheme": "static"}),
    "compressed_block": ("block", {}),
    "compressed_channel": ("channel", {}),
    "compressed_tensor": ("tensor", {}),
}
"""Kind -> (what shares a scale, quantization_config or nothing for compressed-tensors' own)."""


def quantize_checkpoint(source: Path, target: Path, kind: str) -> dict[str, torch.Tensor]:
    """Writes `source` with its layers' matrices as FP8.

    Returns:
        All tensors of the checkpoint in float32, the quantised ones multiplied out.
    """
    strategy, quantization = KINDS[kind]
    stored, plain = {}, {}
    for name, tensor in load_file(source / SINGLE_FILE).items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        stored[name], scale, plain[name] = _quantized(tensor, strategy)
        suffix = "_scale_inv" if kind == "deepseek" else "_scale"
        stored[name + suffix] = scale
        if strategy == "tensor":
            stored[name.replace("weight", "input_scale")] = torch.tensor(0.5)
    save_file(stored, target / SINGLE_FILE)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization or _compressed_tensors(strategy)
    (target / "config.json").write_text(json.dumps(config))
    return plain


def _quantized(
    tensor: torch.Tensor, strategy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns FP8 values, their scales and their product, block by block."""
    num_rows, num_columns = tensor.shape
    rows = {"block": BLOCK, "channel": 1, "tensor": num_rows}[strategy]
    columns = BLOCK if strategy == "block" else num_columns
    values, plain = torch.empty(tensor.shape, dtype=FP8), torch.empty(tensor.shape)
    scales = torch.empty(-(-num_rows // rows), -(-num_columns // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = tensor[part].abs().max() / 448
            values[part] = (tensor[part] / scales[i, j]).to(FP8)
            plain[part] = values[part].float() * scales[i, j]
    return values, scales[0, 0] if strategy == "tensor" else scales, plain


def _compressed_tensors(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
