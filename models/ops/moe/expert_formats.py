"""Experts whose weights stay as they are stored, in 8 or 4 bits, and what their numbers are.

Both formats keep a matrix [N, K] in fewer bytes, with scales beside it. gate_up is gate and up one
above the other, each with scales of its own.

- FP8: [N, K] float8_e4m3fn; float32 scales, [ceil(N / 128), ceil(K / 128)], one per block, or
  [N, 1], one per row.
- MXFP4: [N, K / 2] uint8; scales [N, K / 32] uint8, exponents of two above -127, one per run of 32
  numbers of a row. A byte holds two neighbours, the first in its lower half.

Sources: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3; Open Compute Project 2023,
"OCP Microscaling Formats (MX) Specification", sections 5.1 and 5.3.
"""

import torch

from models.ops.linear.fp8_linear import BLOCK, FP8

MXFP4 = torch.uint8
"""Dtype of packed weights and of their scales."""
MXFP4_RUN = 32
"""Numbers of a row that share an MXFP4 scale; 16 bytes."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of a 4-bit float mean; the fourth is the sign."""


def expert_values(
    weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, *, num_parts: int = 1
) -> torch.Tensor:
    """Returns one expert's matrix as plain numbers, [N, K] of `dtype`.

    Args:
        weight: [N, K], or packed as the module says.
        scale: as the module says; None for weights that are what they say.
        dtype: of the result; scaling is done in float32 or what is more exact.
        num_parts: matrices of equal height that were put one above the other.
    """
    if scale is None:
        return weight
    exact = torch.promote_types(dtype, torch.float32)
    if weight.dtype == FP8:
        parts = zip(weight.chunk(num_parts), scale.chunk(num_parts), strict=True)
        return torch.cat([_fp8_values(*part, exact) for part in parts]).to(dtype)
    return _mxfp4_values(weight, scale, exact).to(dtype)


def _fp8_values(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers of a matrix with a scale per row or block."""
    if scale.shape == (len(weight), 1):
        return weight.to(dtype) * scale.to(dtype)
    scales = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return weight.to(dtype) * scales.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]].to(dtype)


def _mxfp4_values(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers of a packed matrix."""
    signed = (*E2M1_VALUES, *(-value for value in E2M1_VALUES))
    table = torch.tensor(signed, dtype=dtype, device=weight.device)
    values = table[torch.stack((weight & 0xF, weight >> 4), dim=-1).flatten(-2).int()]
    scales = powers_of_two(scale).to(dtype).repeat_interleave(MXFP4_RUN, -1)
    return values * scales


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Returns what unsigned exponent bytes mean, in float32; 255 means not a number."""
    return exponents.view(torch.float8_e8m0fnu).to(torch.float32)
