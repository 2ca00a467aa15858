"""Matrix products, with the norm before them and the gate or the residual sum after them.

A product of few tokens takes as long as reading its weights; on a GPU our kernels fuse its
neighbours. Of products of more tokens, those with a gate or few outputs are ours, the others
torch's.
"""

import torch
from torch.nn import functional

from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.kernel_choice import runs_as_kernel
from models.ops.operands.input_norm import InputNorm
from models.ops.triton.linear.linear_configurations import (
    MOST_TOKENS,
    Tiles,
    VectorTiles,
    skinny_tiles,
)
from models.ops.triton.linear.wide_configurations import WideTiles, wide_tiles

_MANY_TOKENS = 512
"""From this many tokens on torch's product adds to the residual stream faster than the next norm
does."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """Returns x @ weight^T + bias.

    Args:
        x: [T, K].
        weight: [N, K].
        bias: [N].
        is_gated: the weight is [2 * N, K], gate before up; the result is silu(gate) * up.

    Returns:
        [T, N].
    """
    tiles = _tiles(x, weight, bias, is_gated=is_gated)
    if tiles is None:
        wide = _wide_tiles(x, weight, bias, is_gated=True) if is_gated else None
        if wide is not None:
            return _wide_linear(x, weight, wide, is_gated=True)
        output = functional.linear(x, weight, bias)
        return silu_and_mul(output) if is_gated else output
    # Imported on first use: a CPU installation has no Triton.
    if isinstance(tiles, VectorTiles):
        from models.ops.triton.linear.vector_linear import vector_linear

        return vector_linear(x, weight, bias, tiles, is_gated=is_gated)
    from models.ops.triton.linear.matrix_linear import matrix_linear

    return matrix_linear(x, weight, bias, tiles.unsplit(), is_gated=is_gated)


def norm_linear(
    x: torch.Tensor,
    norm: InputNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> torch.Tensor | None:
    """Returns `linear` of the normalised x, [T, N]; None if one kernel cannot do both."""
    tiles = _tiles(x, weight, bias, is_gated=is_gated)
    if not isinstance(tiles, VectorTiles):
        return None
    from models.ops.triton.linear.vector_linear import vector_linear

    return vector_linear(x, weight, bias, tiles, norm=norm, is_gated=is_gated)


def add_linear(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Adds x @ weight^T + bias to the residual stream [T, N], or leaves the sum to the next norm.

    Consumes the residual: with many tokens it becomes the sum.

    Returns:
        The sum and None, or the arguments of `add_rms_norm` (models.ops.elementwise.rms_norm): the
        product, perhaps in parts [S, T, N], and the residual.
    """
    tiles = _tiles(x, weight, bias, is_gated=False)
    if tiles is None:
        wide = _wide_tiles(x, weight, bias, is_gated=False)
        if wide is not None:
            return _wide_linear(x, weight, wide), residual
        if runs_as_kernel(x) and x.shape[0] >= _MANY_TOKENS and bias is None:
            return residual.addmm_(x, weight.t()), None
        return functional.linear(x, weight, bias), residual
    if isinstance(tiles, VectorTiles):
        from models.ops.triton.linear.vector_linear import vector_linear

        return vector_linear(x, weight, bias, tiles, residual=residual), None
    from models.ops.triton.linear.matrix_linear import matrix_linear

    return matrix_linear(x, weight, bias, tiles), residual


def _tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool
) -> Tiles | None:
    """Returns the tiles of our kernel; None if the product is torch's."""
    if not runs_as_kernel(x) or x.dim() != 2 or (is_gated and bias is not None):
        return None
    if x.shape[0] > MOST_TOKENS:  # not worth an entry of the cache
        return None
    size = _size(x, weight, is_gated=is_gated)
    return skinny_tiles(*size, is_gated=is_gated, dtype=x.dtype, device=x.device)


def _wide_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool
) -> WideTiles | None:
    """Returns the tiles of our kernel for many tokens; None if the product is torch's."""
    if not runs_as_kernel(x) or x.dim() != 2 or x.shape[0] <= MOST_TOKENS or bias is not None:
        return None
    size = _size(x, weight, is_gated=is_gated)
    return wide_tiles(*size, is_gated=is_gated, dtype=x.dtype, device=x.device)


def _size(x: torch.Tensor, weight: torch.Tensor, *, is_gated: bool) -> tuple[int, int, int]:
    num_outputs, num_inputs = weight.shape
    return x.shape[0], num_outputs // 2 if is_gated else num_outputs, num_inputs


def _wide_linear(
    x: torch.Tensor, weight: torch.Tensor, tiles: WideTiles, *, is_gated: bool = False
) -> torch.Tensor:
    from models.ops.triton.linear.wide_linear import wide_linear

    return wide_linear(x, weight, tiles, is_gated=is_gated)
