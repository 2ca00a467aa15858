"""Products with each token's adapter: octavo::adapted_linear."""

from collections.abc import Sequence

import torch

from models.batch_invariance import is_batch_invariant
from models.forward_context import slots_of_step
from models.kernels.gpu import has_kernels
from models.kernels.tuning.tiles import MatrixTiles, VectorTiles
from models.ops.custom_op import operator
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.add_adapters import add_slots
from models.ops.products.linear import linear
from models.ops.products.norm_linear import gated_linear
from models.ops.products.product_like import product_like
from models.ops.products.product_tiles import tiles_of_few_tokens


@operator(product_like("x"))
def adapted_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
    is_gated: bool,
) -> torch.Tensor:
    """Returns linear(x) with each token's adapter added, x @ A^T @ B^T.

    Arguments are those of linear, then those of add_adapters.

    Returns:
        [T, N], or if is_gated silu_and_mul of that, [T, N / 2].
    """
    slots = slots_of_step()
    if slots is None:
        return (gated_linear if is_gated else linear)(x, weight, bias, weight_scale)
    adapters = adapter_a, adapter_b, part_sizes, slots
    if is_batch_invariant():
        # The roundings of steps without adapters.
        output = add_slots(linear(x, weight, bias, weight_scale), x, *adapters)
        return silu_and_mul(output) if is_gated else output
    product, is_late = product_or_addends(x, weight, bias, weight_scale)
    if has_kernels(x.device):
        from models.kernels.products.add_adapters import add_adapters

        are_halves = len(part_sizes) == 2 and part_sizes[0] == part_sizes[1]
        gates = is_gated and are_halves
        output = add_adapters(product, x, *adapters, is_gated=gates, is_beside=is_late)
        is_gated = is_gated and not gates
    else:
        output = add_slots(product, x, *adapters)
    return silu_and_mul(output) if is_gated else output


def product_or_addends(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, bool]:
    """Returns linear(x), or addends of it, [S, T, N] float32, where that is faster.

    Also returns whether its kernel was the last one and late; see dependent_launch.
    """
    tiles = tiles_of_few_tokens(x, weight, bias, weight_scale, is_gated=False)
    # Imported on first use: a CPU installation has no Triton.
    if isinstance(tiles, VectorTiles):
        from models.kernels.products.vector_linear import vector_linear

        return (
            vector_linear(x, weight, bias, tiles, weight_scale=weight_scale, is_late=True),
            True,
        )
    if isinstance(tiles, MatrixTiles) and tiles.groups == 1:
        from models.kernels.products.matrix_linear import matrix_linear

        return matrix_linear(x, weight, bias, tiles, is_late=True), True
    return linear(x, weight, bias, weight_scale), False
