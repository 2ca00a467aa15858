"""Products of FP8 weights, with activations as they are or rounded.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; the blocks are those of
DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.
"""

import torch
from torch.nn import functional

from models.kernels.gpu import has_kernels
from models.kernels.products.fp8.fp8_configurations import fp8_tiles, gated_fp8_tiles
from models.kernels.tuning.tiles import NarrowFP8Tiles, WideFP8Tiles
from models.number_formats import BLOCK, FP8, FP8_MAX, SMALLEST_AMAX
from models.operands.rounded_activations import rounded_parts
from models.operands.weight_scales import is_by_block
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.activation_rounding import rounds_activations


def plain_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Returns models.ops.products.linear without our kernels of few tokens, [T, N]."""
    if weight_scale is None:
        return functional.linear(x, weight, bias)
    if rounds_activations(x.shape[0], x.dtype):
        return rounded_product(x, weight, bias, weight_scale)
    # Sizes that no kernel takes; on a CPU the reference.
    return functional.linear(x, dequantized(weight, weight_scale, x.dtype), bias)


def rounded_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor,
    *,
    may_split: bool = False,
) -> torch.Tensor:
    """Returns x @ (weight * weight_scale).T + bias, [T, N], of x rounded to FP8.

    With scales by row a token has one scale, with scales by block one for each 128 features.

    x: [T, K]; K is a multiple of 16 with scales by row.
    weight: [N, K] FP8, contiguous; N is a multiple of 16 with scales by row.
    weight_scale: float32, [N, 1] or [ceil(N / 128), ceil(K / 128)].
    may_split: on a GPU the result may be its addends, [splits, T, N] float32.
    """
    if has_kernels(x.device):
        rounded = rounded_for(x, weight, weight_scale)
    else:
        rounded = quantize(x, BLOCK if is_by_block(weight, weight_scale) else x.shape[-1])
    return product_of_rounded(*rounded, weight, weight_scale, bias, x.dtype, may_split=may_split)


def gated_rounded_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor,
) -> torch.Tensor:
    """Returns silu_and_mul(rounded_product), [T, N / 2], on a GPU."""
    rounded = rounded_for(x, weight, weight_scale)
    return gated_product_of_rounded(*rounded, weight, weight_scale, bias, x.dtype)


def rounded_for(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [T, K] for the product with an FP8 weight, on a GPU.

    Returns:
        [T, K] FP8 and its scales, as empty_token_scales lays them out.
    """
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.products.fp8 import fp8_linear as kernel

    group_size = BLOCK if is_by_block(weight, weight_scale) else x.shape[-1]
    return kernel.quantize(x, group_size, is_transposed=True)


def product_of_rounded(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    may_split: bool = False,
) -> torch.Tensor:
    """Returns the rest of rounded_product after `quantize`, [T, N] of `dtype`.

    scale: on a GPU as empty_token_scales lays it out.
    may_split: on a GPU the result may be its addends, [splits, T, N] float32.
    """
    if not has_kernels(rounded.device):
        return _reference(rounded, scale, weight, weight_scale, bias, dtype)
    tiles = fp8_tiles(len(rounded), *weight.shape, may_split=may_split, device=rounded.device)
    if tiles is not None:
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.products.fp8.rounded_linear import rounded_linear

        return rounded_linear(rounded, scale, weight, weight_scale, bias, tiles, dtype)
    if is_by_block(weight, weight_scale):
        from models.kernels.products.fp8.fp8_linear import fp8_block_linear

        return fp8_block_linear(rounded, scale, weight, weight_scale, bias, dtype)
    # cuBLAS and CUTLASS write products scaled by row in bfloat16 only.
    output = torch._scaled_mm(
        rounded, weight.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16
    ).to(dtype)
    return output if bias is None else output + bias


def product_of_stored(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor,
    *,
    may_split: bool = False,
) -> torch.Tensor:
    """Returns rounded_product of x [T, K] that is rounded already: see rounded_parts."""
    rounded = rounded_parts(x)
    return product_of_rounded(*rounded, weight, weight_scale, bias, x.dtype, may_split=may_split)


def round_in_place(x: torch.Tensor) -> None:
    """Rounds x [T, ...] for products with weights by block, in its memory: see rounded_parts."""
    if has_kernels(x.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.products.fp8 import fp8_linear as kernel

        rounded = kernel.quantize(x.flatten(1), BLOCK)
    else:
        rounded = quantize(x.flatten(1), BLOCK)
    for part, values in zip(rounded_parts(x), rounded, strict=True):
        part.copy_(values)


def gated_product_of_rounded(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns silu_and_mul(product_of_rounded), [T, N / 2]."""
    tiles = _gated_tiles(rounded, weight, weight_scale, bias, is_rounded=False)
    if tiles is None:
        return silu_and_mul(product_of_rounded(rounded, scale, weight, weight_scale, bias, dtype))
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.products.fp8.rounded_linear import gated_rounded_linear

    return gated_rounded_linear(rounded, scale, weight, weight_scale, tiles, dtype)


def rounded_gated_product(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    is_blocked: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gated_product_of_rounded, rounded to FP8 in a product's kernel, and its scales.

    is_blocked: whether each 128 of the results have a scale, or the token has one.
    """
    operands = (rounded, scale, weight, weight_scale)
    tiles = _gated_tiles(rounded, weight, weight_scale, bias, is_rounded=is_blocked)
    # Imported on first use: a CPU installation has no Triton.
    if tiles is not None and is_blocked:
        from models.kernels.products.fp8.rounded_linear import twice_rounded_gated_linear

        return twice_rounded_gated_linear(*operands, tiles, dtype)
    if tiles is not None:
        from models.kernels.products.fp8.fp8_linear import quantize as quantize_on_gpu

        inner = gated_product_of_rounded(*operands, bias, dtype)
        return quantize_on_gpu(inner, inner.shape[1])
    from models.kernels.elementwise.silu_and_mul import rounded_silu_and_mul

    return rounded_silu_and_mul(product_of_rounded(*operands, bias, dtype), is_blocked=is_blocked)


def _gated_tiles(
    rounded: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_rounded: bool,
) -> NarrowFP8Tiles | WideFP8Tiles | None:
    num_outputs, num_inputs = weight.shape[0] // 2, weight.shape[1]
    if bias is not None or (is_by_block(weight, weight_scale) and num_outputs % BLOCK):
        # The rows of up would begin within a block.
        return None
    return gated_fp8_tiles(
        len(rounded), num_outputs, num_inputs, is_rounded=is_rounded, device=rounded.device
    )


def dequantized(
    weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns weight * weight_scale, computed in float32 and rounded once, [N, K] of `dtype`."""
    if is_by_block(weight, weight_scale):
        weight_scale = by_element(weight_scale, weight.shape)
    return (weight.float() * weight_scale).to(dtype)


def quantize(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [T, K] to FP8 with one scale per `group_size` features.

    The last group may be shorter. Scales are [T, ceil(K / group_size)] float32.
    """
    groups = torch.split(x.to(torch.float32), group_size, dim=-1)
    amax = torch.stack([group.abs().amax(-1) for group in groups], dim=-1)
    scale = amax.clamp(min=SMALLEST_AMAX) / FP8_MAX
    pairs = zip(groups, scale.unbind(-1), strict=True)
    scaled = torch.cat([group / each.unsqueeze(-1) for group, each in pairs], dim=-1)
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def by_element(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeats the scales of blocks for each element of a weight of `shape`."""
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def _reference(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes in float32 what the kernels do."""
    num_features = rounded.shape[-1]
    group_size = BLOCK if is_by_block(weight, weight_scale) else num_features
    x_scale = scale.repeat_interleave(group_size, -1)[:, :num_features]
    values = dequantized(weight, weight_scale, torch.float32)
    product = (rounded.float() * x_scale) @ values.t()
    return (product if bias is None else product + bias.float()).to(dtype)
