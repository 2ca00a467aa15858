"""A sum over ranks, its sum with the residual stream, and the norm: octavo::all_reduce_norm."""

import torch

from models.batch_invariance import is_batch_invariant
from models.ops.custom_op import like, operator
from models.ops.elementwise.rms_norm import add_rms_norm, rms_norm
from models.ops.ranks.all_reduce import all_reduce
from models.parallel.collectives import FusedSum, begun, fused_sum


@operator(like("residual"), mutates=("residual",))
def all_reduce_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: str
) -> torch.Tensor:
    """Adds every rank's x to the residual stream in place; returns the normalised sum.

    All ranks get the same bits. The fused kernel runs where the group has one that fits the
    tensors; otherwise the sum of the group's library and `add_rms_norm`.

    Args:
        x: [T, H], this rank's part.
        residual: [T, H], equal on all ranks.
        weight: [H].
        eps: added to the mean square.
        group: the group's name.
    """
    fused = fitting_sum(x, residual, weight, group)
    if fused is None:
        return add_rms_norm(all_reduce(x, group), residual, weight, eps)
    with begun():
        return fused.add_norm(x, residual, weight, eps)


def fitting_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, group: str
) -> FusedSum | None:
    """Returns the group's fused kernel; None without one that fits the operator's tensors."""
    # In that mode the sum is rounded before the residual is added, as without this operator.
    fused = None if is_batch_invariant() else fused_sum(group)
    return fused if fused is not None and fused.fits(x, residual, weight) else None


def ordered_sum_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Computes in torch, bit for bit in the sum, the value that the fused kernel defines.

    Adds in float32, rank after rank from rank 0 on, then the residual, and rounds once. The order
    depends neither on the rank that computes nor on the number of rows.

    Args:
        parts: [R, T, H], every rank's x.
        residual: [T, H]; becomes the sum.
        weight: [H].
        eps: added to the mean square.
    """
    residual.copy_(ordered_sum(parts) + residual.float())
    return rms_norm(residual, weight, eps)


def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """Returns the sum of every rank's x, [R, ...], in float32, added from rank 0 on."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total
