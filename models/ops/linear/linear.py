"""Matrix products: octavo::linear."""

import torch
from torch.nn import functional

from models.ops.batch_invariance import is_batch_invariant
from models.ops.custom_op import direct_register_custom_op
from models.ops.linear.invariant_linear import invariant_linear
from models.ops.linear.product_tiles import tiles_of_few_tokens
from models.ops.triton.linear.linear_configurations import VectorTiles


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x @ weight^T + bias.

    Args:
        x: [T, K].
        weight: [N, K].
        bias: [N].

    Returns:
        [T, N].
    """
    if is_batch_invariant():
        return invariant_linear(x, weight, bias)
    tiles = tiles_of_few_tokens(x, weight, bias, is_gated=False)
    if tiles is None:
        return functional.linear(x, weight, bias)
    # Imported on first use: a CPU installation has no Triton.
    if isinstance(tiles, VectorTiles):
        from models.ops.triton.linear.vector_linear import vector_linear

        return vector_linear(x, weight, bias, tiles)
    from models.ops.triton.linear.matrix_linear import matrix_linear

    return matrix_linear(x, weight, bias, tiles.unsplit())


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    del bias
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


linear = direct_register_custom_op("linear", _linear, (), _fake_linear)
