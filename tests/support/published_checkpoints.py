"""Tiny checkpoints with the quantization_config and the tensors of published ones.

Fields that say nothing of the stored format are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scripts.quantize_tiny import Format
from scripts.quantizers import Parts, fp8

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


def beside_attention(*names: str) -> Callable[[Parts], Parts]:
    """Returns an edit that adds a scale to each layer's attention."""

    def edit(tensors: Parts) -> Parts:
        layers = {name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name}
        return tensors | {f"{layer}.self_attn.{name}": SCALE.clone() for layer in layers
                          for name in names}  # fmt: skip

    return edit


_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}

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
    # mistralai/Devstral-2-123B-Instruct-2512
    "transformers-static": Published(
        Format(
            fp8(0, 0, "weight_scale_inv", activation_scale=0.02),
            _STATIC | {"modules_to_not_convert": ["lm_head"], "weight_block_size": None},
        ),
        "fp8 rows",
    ),
}
"""Name -> form, with an example on the Hugging Face hub."""
