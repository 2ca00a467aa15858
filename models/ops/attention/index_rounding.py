"""Rounds queries and keys of an indexer to FP8: the reference of latent_cache."""

import torch

from models.number_formats import FP8, FP8_MAX, SMALLEST_INDEX_AMAX


def quantize_index(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds heads [..., D], finite, to FP8 with scales [...] float32, which are powers of two.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", inference/kernel.py, act_quant with scales of
    ue8m0; D is its block.
    """
    amax = heads.abs().amax(-1).float().clamp(min=SMALLEST_INDEX_AMAX)
    bits = (amax * (1 / FP8_MAX)).view(torch.int32)
    # The next power of two: one up in the exponent, unless the mantissa is zero.
    scales = (bits + 0x7FFFFF).bitwise_and(0x7F800000).view(torch.float32)
    return (heads / scales.unsqueeze(-1)).to(FP8), scales
