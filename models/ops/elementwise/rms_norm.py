"""Root-mean-square normalisation: octavo::rms_norm, and after a sum: octavo::add_rms_norm."""

import torch
from torch.nn import functional

from models.batch_invariance import is_batch_invariant, row_wise
from models.kernels.gpu import has_kernels
from models.ops.custom_op import like, operator


@operator(like("x"))
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension, contiguous, like x.

    A weight in float32 multiplies before the result is rounded.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    if has_kernels(x.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.elementwise import rms_norm as kernel

        return kernel.rms_norm(x, weight, eps)
    if weight.dtype != x.dtype:
        return row_wise(
            lambda row: functional.rms_norm(row, weight.shape, weight, eps), x.float().contiguous()
        ).to(x.dtype)
    return row_wise(lambda row: functional.rms_norm(row, weight.shape, weight, eps), x.contiguous())


@operator(like("residual"), mutates=("residual",))
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds x to the residual stream in place; returns the normalised sum.

    Args:
        x: [T, K], or its addends [S, T, K] in float32.
        residual: [T, K].
        weight: [K].
        eps: added to the mean square.
    """
    if has_kernels(x.device) and residual.is_contiguous():
        from models.kernels.elementwise import rms_norm as kernel

        rounds = is_batch_invariant()
        return kernel.add_rms_norm(x.contiguous(), residual, weight, eps, rounds=rounds)
    residual.add_(x.sum(0) if x.dim() > residual.dim() else x)
    return rms_norm(residual, weight, eps)
