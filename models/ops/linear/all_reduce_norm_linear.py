"""A sum over ranks, its norm, and the FP8 product after it: octavo::all_reduce_norm_linear.

Layers do not call it: a compiler's pass inserts it.
"""

import torch

from models.ops.communication.all_reduce import all_reduce
from models.ops.communication.all_reduce_norm import all_reduce_norm, fitting_sum
from models.ops.custom_op import direct_register_custom_op
from models.ops.linear.linear import linear
from models.ops.linear.norm_linear import add_norm_linear, gated_linear


def _all_reduce_norm_linear(  # noqa: PLR0913  # an operator takes no dataclasses
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs all_reduce_norm; returns gated_linear if is_gated, else linear, of its result.

    Without a fused sum, the norm's kernel rounds the input of a product of many tokens.

    Args:
        x: [T, H], this rank's part.
        residual: [T, H], equal on all ranks; becomes the sum.
        norm_weight: [H].
        eps: added to the mean square.
        group: the group's name.
        weight: [N, H], of this rank.
        bias: [N].
        is_gated: whether a gate follows the product.
        weight_scale: of an FP8 weight, as in linear.

    Returns:
        [T, N], with a gate [T, N / 2].
    """
    if fitting_sum(x, residual, norm_weight, group) is None:
        following = (norm_weight, eps, weight, bias, is_gated, weight_scale)
        return add_norm_linear(all_reduce(x, group), residual, *following)
    normed = all_reduce_norm(x, residual, norm_weight, eps, group)
    return (gated_linear if is_gated else linear)(normed, weight, bias, weight_scale)


def _fake_all_reduce_norm_linear(  # noqa: PLR0913  # as the operator
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    del x, norm_weight, eps, group, bias, weight_scale
    return residual.new_empty((*residual.shape[:-1], weight.shape[0] // (2 if is_gated else 1)))


all_reduce_norm_linear = direct_register_custom_op(
    "all_reduce_norm_linear", _all_reduce_norm_linear, ("residual",), _fake_all_reduce_norm_linear
)
