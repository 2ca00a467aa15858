"""Products with the norm before them and the gate after them.

octavo::gated_linear and octavo::norm_linear. Layers do not call them: a compiler's passes insert
them.
"""

import torch
from torch.nn import functional

from models.ops.batch_invariance import is_batch_invariant
from models.ops.custom_op import direct_register_custom_op
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.linear.linear import linear
from models.ops.linear.product_tiles import tiles_of_few_tokens, tiles_of_many_tokens
from models.ops.triton.linear.linear_configurations import VectorTiles


def _gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns silu_and_mul(linear(x)).

    Args:
        x: [T, K].
        weight: [2 * N, K], gate before up.
        bias: [2 * N].

    Returns:
        [T, N].
    """
    if is_batch_invariant():
        return silu_and_mul(linear(x, weight, bias))
    tiles = tiles_of_few_tokens(x, weight, bias, is_gated=True)
    # Imported on first use: a CPU installation has no Triton.
    if isinstance(tiles, VectorTiles):
        from models.ops.triton.linear.vector_linear import vector_linear

        return vector_linear(x, weight, bias, tiles, is_gated=True)
    if tiles is not None:
        from models.ops.triton.linear.matrix_linear import matrix_linear

        return matrix_linear(x, weight, bias, tiles, is_gated=True)
    wide = tiles_of_many_tokens(x, weight, bias, is_gated=True)
    if wide is not None:
        from models.ops.triton.linear.wide_linear import wide_linear

        return wide_linear(x, weight, wide, is_gated=True)
    return silu_and_mul(functional.linear(x, weight, bias))


def _fake_gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    del bias
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


def _norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> torch.Tensor:
    """Returns gated_linear if is_gated, else linear, of rms_norm(x)."""
    tiles = None
    if not is_batch_invariant():
        tiles = tiles_of_few_tokens(x, weight, bias, is_gated=is_gated)
    if isinstance(tiles, VectorTiles):
        from models.ops.triton.linear.vector_linear import vector_linear

        return vector_linear(
            x, weight, bias, tiles, norm_weight=norm_weight, eps=eps, is_gated=is_gated
        )
    product = gated_linear if is_gated else linear
    return product(rms_norm(x, norm_weight, eps), weight, bias)


def _fake_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> torch.Tensor:
    del norm_weight, eps, bias
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if is_gated else 1)))


gated_linear = direct_register_custom_op("gated_linear", _gated_linear, (), _fake_gated_linear)
norm_linear = direct_register_custom_op("norm_linear", _norm_linear, (), _fake_norm_linear)
