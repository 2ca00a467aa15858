"""Rotary position embedding: octavo::rotary."""

import torch

from models.batch_invariance import row_wise
from models.kernels.gpu import has_kernels
from models.ops.custom_op import like, operator


@operator(like("x"))
def rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turns each pair (x[i], x[i + D/2]) of every head of x [T, H, D] by its token's angle.

    The table holds the sign of the first half's sine, so the rotation is three operations: x * cos
    + swap_halves(x) * signed_sin. The result is contiguous.

    cos: [T, 1, D], both halves equal.
    signed_sin: [T, 1, D], the first half negated.

    Source: Su et al. 2021, "RoFormer", with the halves layout of GPT-NeoX.
    """
    if has_kernels(x.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.elementwise import rotary as kernel

        return kernel.rotary(x, cos, signed_sin)
    return row_wise(_turned, x.contiguous(), cos, signed_sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, signed_sin)
