"""A sum over ranks and a norm of which each rank computes some rows: sequence_parallel_norm.

Of many rows a rank gets only its share of the sum, adds it to its share of the residual stream,
normalises that and sends it to all. The other rows of its residual stream are out of date from then
on; octavo::gather_residual brings them up to date. Both choose by what all operators of a step have
in common. Layers call neither: a compiler's pass inserts them.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 4.2.2.
"""

import torch

from models.ops.batch_invariance import is_batch_invariant
from models.ops.communication.all_reduce_norm import all_reduce_norm
from models.ops.custom_op import direct_register_custom_op
from models.ops.elementwise.rms_norm import add_rms_norm
from models.parallel.collectives import (
    all_gather_rows,
    fused_sum,
    num_ranks,
    own_rows,
    reaches_other_ranks,
    reduce_scatter_rows,
)

SHARE_BYTES = 8 * 2**20
"""Bytes of a rank's share of the rows from which ranks share them.

Source: SP_MIN_PER_GPU_SIZE_MB for Hopper in vLLM's compilation/passes/fusion.
"""


def _sequence_parallel_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: str,
    is_summed: bool,
) -> torch.Tensor:
    """Runs all_reduce_norm; where ranks share the rows, only theirs of the residual are the sum.

    Args:
        x: [T, H], this rank's part.
        residual: [T, H]; the rows of `current_rows` are equal on all ranks that have them.
        weight: [H].
        eps: added to the mean square.
        group: the group's name.
        is_summed: whether x is of linear_reduce_scatter.

    Returns:
        [T, H], the same bits on all ranks.
    """
    if not shares_rows(residual, group):
        return all_reduce_norm(x, residual, weight, eps, group)
    own = residual[current_rows(residual, group)]
    normed = add_rms_norm(own_sum(x, group, is_summed=is_summed), own, weight, eps)
    return all_gather_rows(normed, residual.shape[0], group)


def _fake_sequence_parallel_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: str,
    is_summed: bool,
) -> torch.Tensor:
    del x, weight, eps, group, is_summed
    return residual.new_empty(residual.shape)


def _gather_residual(residual: torch.Tensor, group: str) -> None:
    """Brings all rows of the residual stream [T, H] up to date, where ranks share them."""
    if shares_rows(residual, group):
        own = residual[current_rows(residual, group)]
        residual.copy_(all_gather_rows(own, residual.shape[0], group))


def own_sum(x: torch.Tensor, group: str, *, is_summed: bool) -> torch.Tensor:
    """Returns this rank's rows of the sum of all ranks' x [T, H], where ranks share them."""
    return x[current_rows(x, group)] if is_summed else reduce_scatter_rows(x, group)


def shares_rows(residual: torch.Tensor, group: str) -> bool:
    """Returns whether each rank computes its share of the rows of a residual stream [T, H].

    The answer is the same for each tensor of the stream's shape and dtype. The fused kernel needs
    no library's sum, and batch-invariant sums are added in rank order.
    """
    if is_batch_invariant() or not reaches_other_ranks() or fused_sum(group) is not None:
        return False
    size = num_ranks(group)
    # Of fewer rows the last rank could have none.
    return residual.shape[0] > (size - 1) ** 2 and residual.nbytes >= size * SHARE_BYTES


def current_rows(residual: torch.Tensor, group: str) -> slice:
    """Returns the rows of the residual stream [T, H] that this rank keeps up to date."""
    num_rows = residual.shape[0]
    return own_rows(num_rows, group) if shares_rows(residual, group) else slice(num_rows)


sequence_parallel_norm = direct_register_custom_op(
    "sequence_parallel_norm", _sequence_parallel_norm, ("residual",), _fake_sequence_parallel_norm
)
gather_residual = direct_register_custom_op("gather_residual", _gather_residual, ("residual",))
