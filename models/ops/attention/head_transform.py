"""Normalises and rotates query and key heads."""

import torch

from models.operands.head_transform import HeadTransform
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.rotary import rotary


def transform_heads(
    q: torch.Tensor, k: torch.Tensor, transform: HeadTransform
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q [T, Hq, D] and k [T, Hk, D], normalised and rotated, contiguous."""
    if transform.q_weight is not None and transform.k_weight is not None:
        q = rms_norm(q, transform.q_weight, transform.eps)
        k = rms_norm(k, transform.k_weight, transform.eps)
    rotation = transform.cos, transform.signed_sin
    return rotary(q, *rotation), rotary(k, *rotation)
