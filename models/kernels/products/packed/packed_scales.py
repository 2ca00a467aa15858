"""Scales of packed weights as the kernels of linear layers take them."""

import torch

from models.operands.packed_weights import columns_per_scale, has_floats


def scale_operand(weight: torch.Tensor, scale: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Returns how many columns share a scale, and the scales: of NVFP4 words of two."""
    is_nvfp4 = scale.dtype == torch.bfloat16 and has_floats(weight, scale)
    return columns_per_scale(weight, scale), scale.view(torch.int32) if is_nvfp4 else scale
