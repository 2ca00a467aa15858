"""Rotary position embedding."""

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turns each pair (x[i], x[i + D/2]) of every head of x [T, H, D] by its token's angle.

    The table holds the sign of the first half's sine, so the rotation is three operations: x * cos
    + swap_halves(x) * signed_sin.

    cos: [T, 1, D], both halves equal.
    signed_sin: [T, 1, D], the first half negated.

    Source: Su et al. 2021, "RoFormer", with the halves layout of GPT-NeoX.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, signed_sin)
