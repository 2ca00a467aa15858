"""FP8 products: weights are stored in FP8, activations are rounded to it.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; the blocks are those of
DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.
"""

import torch

from models.number_formats import BLOCK, FP8, FP8_MAX, SMALLEST_AMAX
from models.ops.batch_invariance import is_batch_invariant, row_wise
from models.ops.custom_op import direct_register_custom_op
from models.ops.kernel_choice import has_kernels


def fp8_row_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns x @ (weight * weight_scale).T + bias, [T, N], x rounded with one scale per token.

    x: [T, K], K a multiple of 16.
    weight: [N, K] FP8, contiguous, N a multiple of 16.
    weight_scale: [N, 1] float32.
    """
    output: torch.Tensor = torch.ops.octavo.fp8_linear(x, weight, weight_scale, bias, False)
    return output


def fp8_block_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns x @ (weight * weight_scale).T + bias, [T, N], x rounded in runs of 128 features.

    x: [T, K].
    weight: [N, K] FP8, contiguous.
    weight_scale: [ceil(N / 128), ceil(K / 128)] float32.
    """
    output: torch.Tensor = torch.ops.octavo.fp8_linear(x, weight, weight_scale, bias, True)
    return output


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


def _fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    is_blocked: bool,
) -> torch.Tensor:
    if not has_kernels(x.device):
        return row_wise(lambda row: _reference(row, weight, weight_scale, bias, is_blocked), x)
    if is_batch_invariant():
        from models.ops.linear.invariant_linear import invariant_fp8_linear

        return invariant_fp8_linear(x, weight, weight_scale, bias, is_blocked)
    from models.ops.triton.linear import fp8_linear as kernel

    if is_blocked:
        return kernel.fp8_block_linear(x, weight, weight_scale, bias)
    rounded, scale = kernel.quantize(x, x.shape[-1])
    # cuBLAS and CUTLASS write products scaled by row in bfloat16 only.
    output = torch._scaled_mm(
        rounded, weight.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16
    ).to(x.dtype)
    return output if bias is None else output + bias


def _fake_fp8_linear(x: torch.Tensor, weight: torch.Tensor, *others: object) -> torch.Tensor:
    del others
    return x.new_empty((x.shape[0], weight.shape[0]))


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    is_blocked: bool,
) -> torch.Tensor:
    """Computes in float32 what the kernels do: rounds both factors, then multiplies."""
    num_features = x.shape[-1]
    group_size = BLOCK if is_blocked else num_features
    rounded, scale = quantize(x, group_size)
    x_scale = scale.repeat_interleave(group_size, -1)[:, :num_features]
    if is_blocked:
        weight_scale = by_element(weight_scale, weight.shape)
    product = (rounded.float() * x_scale) @ (weight.float() * weight_scale).t()
    return (product if bias is None else product + bias.float()).to(x.dtype)


direct_register_custom_op("fp8_linear", _fp8_linear, (), _fake_fp8_linear)
