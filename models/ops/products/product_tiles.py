"""Decides which products run as our kernels.

A product of few tokens takes as long as reading its weights; on a GPU our kernels fuse its
neighbours. Of products of more tokens, those with a gate or few outputs are ours, the others
torch's.
"""

import torch

from models.kernels.gpu import has_kernels
from models.kernels.products.linear_configurations import (
    MOST_TOKENS,
    MOST_TOKENS_OF_FEW_OUTPUTS,
    Tiles,
    fp8_vector_tiles,
    skinny_tiles,
)
from models.kernels.products.wide_configurations import wide_tiles
from models.kernels.tuning.tiles import WideTiles
from models.number_formats import BLOCK
from models.operands.weight_scales import is_by_block


def tiles_of_few_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    *,
    is_gated: bool,
) -> Tiles | None:
    """Returns the tiles of our kernel of few tokens; None if another one is to be used.

    weight_scale: of an FP8 weight, by row or by block.
    is_gated: the weight is [2 * N, K], gate before up.
    """
    if not _is_ours(x, weight) or (is_gated and bias is not None):
        return None
    if x.shape[0] > MOST_TOKENS_OF_FEW_OUTPUTS:  # not worth an entry of the cache
        return None
    size = _size(x, weight, is_gated=is_gated)
    if weight_scale is None:
        return skinny_tiles(*size, is_gated=is_gated, dtype=x.dtype, device=x.device)
    is_shared = is_gated and is_by_block(weight, weight_scale) and size[1] % BLOCK
    if x.shape[0] > 1 or is_shared:
        # It is rounded, or the rows of up would begin within a block.
        return None
    return fp8_vector_tiles(*size[1:], is_gated=is_gated, dtype=x.dtype, device=x.device)


def tiles_of_many_tokens(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool
) -> WideTiles | None:
    """Returns the tiles of our kernel for more tokens; None if the product is torch's."""
    if x.dtype != weight.dtype or bias is not None:
        return None
    if not _is_ours(x, weight) or x.shape[0] <= MOST_TOKENS:
        return None
    size = _size(x, weight, is_gated=is_gated)
    return wide_tiles(*size, is_gated=is_gated, dtype=x.dtype, device=x.device)


def _is_ours(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether our kernels take a product's factors."""
    return has_kernels(x.device) and x.dim() == 2 and x.is_contiguous() and weight.is_contiguous()


def _size(x: torch.Tensor, weight: torch.Tensor, *, is_gated: bool) -> tuple[int, int, int]:
    num_outputs, num_inputs = weight.shape
    return x.shape[0], num_outputs // 2 if is_gated else num_outputs, num_inputs
