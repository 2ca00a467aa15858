"""Rotation of patches' heads: octavo::turn_heads."""

import torch

from models.kernels.gpu import has_kernels
from models.ops.custom_op import like, operator


@operator(like("x"))
def turn_heads(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotates heads in float32; the halves of a head are the coordinates of its pairs.

    Args:
        x: [N, H, D].
        rotation: [N, 2, D] float32, cosines and sines.

    Returns:
        [N, H, D], contiguous, of the dtype of x.
    """
    if has_kernels(x.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.elementwise import turn_heads as kernel

        return kernel.turn_heads(x, rotation)
    values = x.float()
    first, second = values.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    cos, sin = rotation.unsqueeze(1).unbind(2)
    return (values * cos + swapped * sin).to(x.dtype)
