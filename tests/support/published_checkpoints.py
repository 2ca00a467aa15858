"""Tiny checkpoints with the quantization_config and the tensors of published ones.

Fields that say nothing of the stored format are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scripts.quantize_tiny import Format, compressed
from scripts.quantizers import Parts, fp8, gptq, int8, mxfp4, packed

SCALE = torch.tensor(0.02)


@dataclass(frozen=True)
class Published:
    """One way in which checkpoints are published."""

    form: Format
    kept: str
    """How projections are kept where products take them as they are."""
    variant: str = "llama"
    edit: Callable[[Parts], Parts] = lambda tensors: tensors
    """Changes stored tensors without changing the values of weights."""
    sizes: dict[str, Any] = field(default_factory=dict)


def beside_attention(*names: str) -> Callable[[Parts], Parts]:
    """Returns an edit that adds a scale to each layer's attention."""

    def edit(tensors: Parts) -> Parts:
        layers = {name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name}
        return tensors | {f"{layer}.self_attn.{name}": SCALE.clone() for layer in layers
                          for name in names}  # fmt: skip

    return edit


def beside_weights(**parts: Tensor) -> Callable[[Parts], Parts]:
    """Returns an edit that adds tensors beside each scaled weight."""
    return lambda tensors: tensors | {
        name.replace("weight_scale", part): value.clone()
        for name in tensors if name.endswith("weight_scale")
        for part, value in parts.items()
    }  # fmt: skip


def without_order(tensors: Parts) -> Parts:
    """Returns tensors that name the group 0 for each column, as some tools for GPTQ do."""
    return {name: value * 0 if name.endswith("g_idx") else value
            for name, value in tensors.items()}  # fmt: skip


_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_INT4 = {"bits": 4, "group_size": 128, "sym": True}
_GPTQ = _INT4 | {"quant_method": "gptq", "desc_act": False, "checkpoint_format": "gptq"}

PUBLISHED: dict[str, Published] = {
    # neuralmagic/Meta-Llama-3-8B-Instruct-FP8-KV, amd/Llama-3.1-8B-Instruct-FP8-KV
    "autofp8-kv": Published(
        Format(
            fp8(0, 0, input_scale=0.02),
            _STATIC | {"ignored_layers": ["lm_head"], "kv_cache_scheme": "static"},
        ),
        "fp8 rows",
        edit=beside_attention("k_proj.output_scale", "v_proj.output_scale"),
    ),
    # nm-testing/Meta-Llama-3-8B-Instruct-FP8, by the first AutoFP8
    "autofp8-old": Published(Format(fp8(0, 0, act_scale=0.02), _STATIC), "fp8 rows"),
    # mistralai/Devstral-2-123B-Instruct-2512
    "transformers-static": Published(
        Format(
            fp8(0, 0, "weight_scale_inv", activation_scale=0.02),
            _STATIC | {"modules_to_not_convert": ["lm_head"], "weight_block_size": None},
        ),
        "fp8 rows",
    ),
    # OPEA/Qwen2.5-7B-Instruct-int4-asym-inc: made by AutoRound before 0.5
    "autoround-old": Published(
        Format(
            gptq(128, symmetric=False, zero_offset=0),
            _INT4 | {"quant_method": "intel/auto-round", "sym": False, "data_type": "int",
                     "backend": "auto_round:exllamav2"},
        ),
        "int4 groups of 128, zero points",
    ),
    "gptq-no-order": Published(Format(gptq(128), _GPTQ), "int4 groups of 128", edit=without_order),
    "gptq-v2-unsaid": Published(Format(gptq(128, zero_offset=0), _GPTQ), "int4 groups of 128"),
    # ModelCloud/DeepSeek-V2-Lite-gptq-4bit: 10,944 columns are 85.5 groups
    "gptq-part-of-a-group": Published(
        Format(gptq(128), _GPTQ), "int4 groups of 128", sizes={"intermediate_size": 320}
    ),
    # Patterns name modules as the checkpoint does: block_sparse_moe, which is mlp in the model.
    "gptq-mixtral-dynamic": Published(
        Format(
            gptq(128),
            _GPTQ | {"dynamic": {r"+:.*\.block_sparse_moe\..*": {"group_size": 64}}},
            others={"block_sparse_moe": gptq(64)},
        ),
        "int4 groups of 64",
        variant="mixtral",
    ),
    # Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8
    "gptq-int8": Published(
        Format(gptq(128, bits=8), _GPTQ | {"bits": 8}), "int8 groups of 128"
    ),
    # RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16
    "redhat-w8a16": Published(
        Format(packed(-1, bits=8), compressed("pack-quantized", _INT8)), "int8 rows"
    ),
    # RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8, here with static activations
    "redhat-w8a8": Published(
        Format(
            int8,
            compressed("int-quantized", _INT8, _INT8 | {"symmetric": False, "strategy": "tensor"}),
        ),
        "int8 rows",
        edit=beside_weights(input_scale=SCALE, input_zero_point=torch.tensor([3]).to(torch.int8)),
    ),
    # Made by Quark, file by file, of an FP8 checkpoint whose attention it leaves alone
    # (vllm-project/vllm#54556)
    "quark-over-fp8": Published(
        Format(
            mxfp4("weight"),
            {"quant_method": "quark", "exclude": ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"],
             "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group",
                                                "group_size": 32}}},
            others={"self_attn": fp8(128, 128)},
        ),
        "mxfp4",
        variant="deepseek_v3",
    ),
    # AMD's form of Kimi-K2 with a cache of 8 bits
    "quark-latent-cache": Published(
        Format(
            fp8(1, 0),
            {"quant_method": "quark", "exclude": ["lm_head", "re:.*mlp.gate$"],
             "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}},
        ),
        "fp8 rows",
        variant="deepseek_v3",
        edit=beside_attention("kv_b_proj.output_scale"),
    ),
}  # fmt: skip
"""Name -> form, with an example on the Hugging Face hub."""
