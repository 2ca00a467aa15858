"""sequence_parallel_norm and the FP8 product after it: octavo::sequence_parallel_norm_linear.

Layers do not call it: a compiler's pass inserts it.
"""

import torch

from models.number_formats import FP8
from models.ops.communication.sequence_parallel_norm import (
    current_rows,
    own_sum,
    sequence_parallel_norm,
    shares_rows,
)
from models.ops.custom_op import direct_register_custom_op
from models.ops.linear.all_reduce_norm_linear import all_reduce_norm_linear
from models.ops.linear.linear import linear
from models.ops.linear.norm_linear import (
    gated_linear,
    gated_or_not,
    rounded_norm,
    rounds_in_norm,
)
from models.ops.operands.token_scales import empty_token_scales
from models.parallel.collectives import all_gather_rows


def _sequence_parallel_norm_linear(  # noqa: PLR0913  # an operator takes no dataclasses
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group: str,
    is_summed: bool,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs sequence_parallel_norm; returns gated_linear if is_gated, else linear, of its result.

    Where ranks share the rows and the norm's kernel rounds, rows travel in FP8. The arguments are
    those of both operators, the result is that of all_reduce_norm_linear.
    """
    product = (weight, bias, is_gated, weight_scale)
    if not shares_rows(residual, group):
        return all_reduce_norm_linear(x, residual, norm_weight, eps, group, *product)
    if not rounds_in_norm(residual, weight_scale):
        normed = sequence_parallel_norm(x, residual, norm_weight, eps, group, is_summed)
        return (gated_linear if is_gated else linear)(normed, weight, bias, weight_scale)
    own = residual[current_rows(residual, group)]
    summed = own_sum(x, group, is_summed=is_summed)
    rounded = rounded_norm(summed, own, norm_weight, eps, weight, weight_scale)
    gathered = gather_rounded(*rounded, residual.shape[0], group)
    return gated_or_not(*gathered, weight, bias, weight_scale, residual.dtype, is_gated=is_gated)


def gather_rounded(
    rounded: torch.Tensor, scale: torch.Tensor, num_rows: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all ranks' rows of activations in FP8 and their scales, as empty_token_scales.

    rounded: [own rows, K].
    scale: [own rows, groups] float32.
    """
    # Libraries sum FP8 or do not know it; bytes they all move.
    gathered = all_gather_rows(rounded.view(torch.uint8), num_rows, group).view(FP8)
    scales = empty_token_scales(num_rows, scale.shape[1], scale.device)
    scales.copy_(all_gather_rows(scale, num_rows, group))
    return gathered, scales


def _fake_sequence_parallel_norm_linear(  # noqa: PLR0913  # as the operator
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group: str,
    is_summed: bool,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    del x, norm_weight, eps, group, is_summed, bias, weight_scale
    return residual.new_empty((*residual.shape[:-1], weight.shape[0] // (2 if is_gated else 1)))


sequence_parallel_norm_linear = direct_register_custom_op(
    "sequence_parallel_norm_linear",
    _sequence_parallel_norm_linear,
    ("residual",),
    _fake_sequence_parallel_norm_linear,
)
