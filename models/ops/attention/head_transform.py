"""What happens to queries and keys between their projection and attention."""

from dataclasses import dataclass

import torch

from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.rotary import apply_rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """Rotary positions, and each head's norm before them if there are weights.

    cos, signed_sin: [T, 1, D], see `models.ops.elementwise.rotary.apply_rotary`.
    q_weight, k_weight: [D], of the norms; both or neither. eps: theirs.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float


def transform_heads(
    q: torch.Tensor, k: torch.Tensor, transform: HeadTransform
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q [T, Hq, D] and k [T, Hk, D], normalised and rotated, contiguous."""
    if transform.q_weight is not None and transform.k_weight is not None:
        q = rms_norm(q, transform.q_weight, transform.eps)
        k = rms_norm(k, transform.k_weight, transform.eps)
    rotation = transform.cos, transform.signed_sin
    return apply_rotary(q, *rotation), apply_rotary(k, *rotation)
