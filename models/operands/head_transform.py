"""The norms and rotation of query and key heads before attention."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """Rotary positions, after each head's norm if there are weights.

    cos, signed_sin: [T, 1, D], see `models.ops.elementwise.rotary.rotary`.
    q_weight, k_weight: [D], of the norms; both or neither.
    eps: of the norms.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float


def head_transform_of(
    cos: torch.Tensor | None,
    signed_sin: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> HeadTransform | None:
    """Returns the transform of an operator's arguments; None without a rotation."""
    if cos is None or signed_sin is None:
        return None
    return HeadTransform(
        cos=cos, signed_sin=signed_sin, q_weight=q_weight, k_weight=k_weight, eps=eps
    )
