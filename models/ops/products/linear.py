"""Matrix products: octavo::linear.

A weight is in the dtype of x, or in FP8 with a scale for each row or block of 128 x 128.
"""

import torch

from models.batch_invariance import is_batch_invariant
from models.kernels.tuning.tiles import VectorTiles
from models.ops.custom_op import operator
from models.ops.products.activation_rounding import leaves_rounded
from models.ops.products.fp8_linear import plain_product, product_of_stored
from models.ops.products.invariant_linear import invariant_linear
from models.ops.products.product_like import product_like
from models.ops.products.product_tiles import tiles_of_few_tokens


@operator(product_like("x"))
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None = None,
    is_rounded: bool = False,
) -> torch.Tensor:
    """Returns x @ weight^T + bias.

    Args:
        x: [T, K].
        weight: [N, K].
        bias: [N].
        weight_scale: of an FP8 weight, whose values it multiplies: float32, [N, 1], or
            [ceil(N / 128), ceil(K / 128)]. rounds_activations says when x is rounded as well.
        is_rounded: x is attention's output, rounded in its memory if leaves_rounded.

    Returns:
        [T, N].
    """
    if is_batch_invariant():
        return invariant_linear(x, weight, bias, weight_scale)
    if weight_scale is not None:
        if leaves_rounded(x, may_round=is_rounded):
            return product_of_stored(x, weight, bias, weight_scale)
        x = x.contiguous()
    tiles = tiles_of_few_tokens(x, weight, bias, weight_scale, is_gated=False)
    if tiles is None:
        return plain_product(x, weight, bias, weight_scale)
    # Imported on first use: a CPU installation has no Triton.
    if isinstance(tiles, VectorTiles):
        from models.kernels.products.vector_linear import vector_linear

        return vector_linear(x, weight, bias, tiles, weight_scale=weight_scale)
    from models.kernels.products.matrix_linear import matrix_linear

    return matrix_linear(x, weight, bias, tiles.unsplit(), weight_scale=weight_scale)
