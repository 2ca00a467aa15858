"""Root-mean-square normalisation, alone and with the residual sum before it."""

import torch
from torch.nn import functional

from models.ops.kernel_choice import runs_as_kernel


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    if runs_as_kernel(x):
        from models.ops.triton.elementwise import rms_norm as kernel

        return kernel.rms_norm(x, weight, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual stream; returns the normalised sum and the sum itself.

    Args:
        x: [T, K], or its addends [S, T, K] in float32.
        residual: [T, K].
        weight: [K].
        eps: added to the mean square.
    """
    if runs_as_kernel(x) and residual.is_contiguous():
        from models.ops.triton.elementwise import rms_norm as kernel

        return kernel.add_rms_norm(x, residual, weight, eps)
    if x.dim() > residual.dim():
        x = x.sum(0).to(residual.dtype)
    residual = residual + x
    return rms_norm(residual, weight, eps), residual
