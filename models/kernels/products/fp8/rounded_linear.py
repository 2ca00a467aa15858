"""Products of activations that are rounded to FP8 with FP8 weights, by tiles of few or many tokens.

Sums over each 128 inputs are the same bits in all tiles, and are added in order: without splits, so
are the products.
"""

import torch

from models.kernels.products.fp8.narrow_fp8_linear import launch_narrow
from models.kernels.products.fp8.wide_fp8_linear import launch_wide
from models.kernels.tuning.tiles import NarrowFP8Tiles, WideFP8Tiles
from models.number_formats import BLOCK, FP8
from models.operands.token_scales import empty_token_scales


def rounded_linear(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: NarrowFP8Tiles | WideFP8Tiles,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes models.ops.products.fp8_linear.product_of_rounded.

    K is a multiple of 16.

    Returns:
        [T, N] of `dtype`; with tiles.splits > 1 its addends, [splits, T, N] float32.
    """
    num_tokens, num_outputs = len(rounded), len(weight)
    shape, parts = (num_tokens, num_outputs), (tiles.splits, num_tokens, num_outputs)
    if tiles.splits == 1:
        output = torch.empty(shape, dtype=dtype, device=rounded.device)
    else:
        output = torch.empty(parts, dtype=torch.float32, device=rounded.device)
    _launch(rounded, scale, weight, weight_scale, bias, tiles, output, None, dtype, is_gated=False)
    return output


def gated_rounded_linear(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    tiles: NarrowFP8Tiles | WideFP8Tiles,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns silu_and_mul(rounded_linear), [T, N / 2] of `dtype`; gate and up share no block."""
    output = torch.empty(len(rounded), len(weight) // 2, dtype=dtype, device=rounded.device)
    _launch(rounded, scale, weight, weight_scale, None, tiles, output, None, dtype, is_gated=True)
    return output


def twice_rounded_gated_linear(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    tiles: NarrowFP8Tiles | WideFP8Tiles,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gated_rounded_linear rounded to FP8, and its scales [T, ceil(N / 256)] by block.

    Narrow tiles have two groups.
    """
    num_outputs = len(weight) // 2
    output = torch.empty(len(rounded), num_outputs, dtype=FP8, device=rounded.device)
    scales = empty_token_scales(len(rounded), -(-num_outputs // BLOCK), rounded.device)
    _launch(rounded, scale, weight, weight_scale, None, tiles, output, scales, dtype, is_gated=True)
    return output, scales


def _launch(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: NarrowFP8Tiles | WideFP8Tiles,
    output: torch.Tensor,
    output_scale: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    is_gated: bool,
) -> None:
    operands = (rounded, scale, weight, weight_scale, bias)
    if isinstance(tiles, NarrowFP8Tiles):
        launch_narrow(*operands, tiles, output, output_scale, dtype, is_gated=is_gated)
    else:
        launch_wide(*operands, tiles, output, output_scale, dtype, is_gated=is_gated)
