"""Experts whose weights stay in 8 or 4 bits, and how their values are computed.

Each format keeps a matrix [N, K] in fewer bytes, with scales. gate_up stacks gate and up, each with
scales of its own.

- FP8: [N, K]; float32 scales, [ceil(N / 128), ceil(K / 128)] by block or [N, 1] by row.
- MXFP4: [N, K / 2] uint8, in the kernel order of models.operands.packed_weights; scales uint8,
  exponents of two plus 127, one per run of 32 elements of a row, in the tile order of
  models.operands.run_scales, [2 * ceil(K / 256), N, 4].
- NVFP4: [N, K / 2] uint8, in the same kernel order; scales bfloat16, each the product of both
  stored ones, per 16 elements of a row, in the same tile order, [2 * ceil(K / 256), N, 8].
- Integers: [N, K / 2] uint8, in the same kernel order; scales int32, words of a scale and a zero
  point for each 32, 64 or 128 elements of a row, in the same tile order,
  [2 * ceil(K / 256), N, 128 / elements].

Sources: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3; Open Compute Project 2023,
"OCP Microscaling Formats (MX) Specification", sections 5.1 and 5.3.
"""

import torch

from models.number_formats import FP8
from models.operands.packed_weights import packed_values
from models.operands.run_scales import by_row, scales_and_zeros
from models.ops.products.fp8_linear import by_element


def expert_values(
    weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, *, num_parts: int = 1
) -> torch.Tensor:
    """Returns one expert's matrix without scales, [N, K] of `dtype`.

    Scaling is done in float32 or wider. The matrix may stack num_parts of equal height.
    """
    if scale is None:
        return weight
    exact = torch.promote_types(dtype, torch.float32)
    if weight.dtype == FP8:
        parts = zip(weight.chunk(num_parts), scale.chunk(num_parts), strict=True)
        return torch.cat([_fp8_values(*part, exact) for part in parts]).to(dtype)
    scale, zero = by_row(scale, 2 * weight.shape[1], num_parts), None
    if scale.dtype == torch.int32:
        scale, zero = scales_and_zeros(scale)
    return packed_values(weight, scale, zero, dtype)


def _fp8_values(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if scale.shape == (len(weight), 1):
        return weight.to(dtype) * scale.to(dtype)
    return weight.to(dtype) * by_element(scale, weight.shape).to(dtype)
