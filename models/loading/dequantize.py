"""Converts stored FP8 and MXFP4 weights to wider floats, exactly."""

import torch

from models.number_formats import E2M1_VALUES, E8M0, FP8, FP8_MAX, MXFP4_RUN, SMALLEST_AMAX

STRIP_ROWS = 1024
"""Rows of an FP8 weight that are converted at a time, rounded up to whole blocks."""


def dequantize_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block_size: tuple[int, int] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns weight [N, K] * scale, computed in float32 and rounded once.

    scale: from `normalized_scale`.
    block_size: rows and columns of a block, or None without blocks.
    """
    num_columns = weight.shape[1]
    rows, columns = block_size or (1, num_columns)
    scale = scale.to(torch.float32)
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    # Strip by strip: float32 takes four times the memory of the weight.
    blocks_per_strip = -(-STRIP_ROWS // rows)
    for first in range(0, scale.shape[0], blocks_per_strip):
        strip = slice(first * rows, (first + blocks_per_strip) * rows)
        scales = scale[first : first + blocks_per_strip].repeat_interleave(rows, 0)
        scales = scales.repeat_interleave(columns, 1)[: len(weight[strip]), :num_columns]
        result[strip] = weight[strip].to(torch.float32) * scales
    return result


def normalized_scale(
    scale: torch.Tensor, weight_shape: torch.Size, block_size: tuple[int, int] | None
) -> torch.Tensor:
    """Returns an FP8 weight's scales in one form, as a view: as stored with blocks, else [N, 1].

    scale: as stored: [ceil(N / rows), ceil(K / columns)] with blocks, else one element, [N] or [N,
        1].

    Raises:
        ValueError: the scale has another shape.
    """
    num_rows, num_columns = weight_shape
    if scale.dim() == 4 and scale.shape[1] == scale.shape[3] == 1:
        scale = scale[:, 0, :, 0]  # ModelOpt keeps the dimensions within blocks
    if block_size is not None:
        expected = -(-num_rows // block_size[0]), -(-num_columns // block_size[1])
        if tuple(scale.shape) != expected:
            raise ValueError(
                f"its shape is {tuple(scale.shape)}; blocks of {block_size} in a weight of "
                f"{tuple(weight_shape)} need {expected}"
            )
        return scale
    if scale.numel() not in (1, num_rows) or tuple(scale.shape) not in (
        (),
        (1,),
        (1, 1),
        (num_rows,),
        (num_rows, 1),
    ):
        raise ValueError(
            f"its shape is {tuple(scale.shape)}; a weight of {tuple(weight_shape)} needs one "
            f"scale or {num_rows}"
        )
    return scale.reshape(-1, 1).expand(num_rows, 1)


def dequantize_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the values of stacked MXFP4 matrices, transposed: [E, K, N] of `dtype`.

    Every value is exact in bfloat16 and float32; float16 cannot represent every scale.
    blocks: [E, N, K / 32, 16] uint8; the lower half of a byte comes first.
    scales: [E, N, K / 32] uint8, exponents of two plus 127; 255 is NaN.
    """
    num_experts, num_rows, num_blocks, _ = blocks.shape
    shape = (num_experts, num_blocks * MXFP4_RUN, num_rows)
    result = torch.empty(shape, dtype=dtype, device=blocks.device)
    # One expert at a time: indices and float32 values take many times the memory of the blocks.
    for target, expert, exponents in zip(result, blocks, scales, strict=True):
        values = _e2m1_values(expert) * _powers_of_two(exponents).unsqueeze(-1)
        target.copy_(values.flatten(-2).transpose(0, 1))
    return result


def check_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Raises ValueError unless blocks and scales fit together; see `dequantize_mxfp4`."""
    if blocks.dtype != torch.uint8 or blocks.dim() != 4 or blocks.shape[-1] != MXFP4_RUN // 2:
        raise ValueError(
            f"it is {blocks.dtype} of shape {tuple(blocks.shape)}; "
            "MXFP4 blocks are uint8 [experts, rows, blocks, 16]"
        )
    if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
        raise ValueError(
            f"its scales are {scales.dtype} of shape {tuple(scales.shape)}; "
            f"they must be uint8 {tuple(blocks.shape[:-1])}"
        )


def dequantize_fp4(
    packed: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None = None,
    *,
    is_inverse: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns the values of one matrix of 4-bit floats, [N, K] of `dtype`.

    packed: [N, K / 2] uint8; the lower half of a byte comes first.
    scale: [N, K / 32] uint8, exponents of two plus 127 (MXFP4), or [N, K / 16] FP8 (NVFP4).
    outer: one factor of all NVFP4 scales; is_inverse: what they were multiplied with.
    """
    num_rows, num_columns = packed.shape[0], 2 * packed.shape[1]
    result = torch.empty(num_rows, num_columns, dtype=dtype, device=packed.device)
    run = num_columns // scale.shape[1]
    factor = torch.ones((), device=packed.device) if outer is None else outer.float().reshape(())
    for first in range(0, num_rows, STRIP_ROWS):
        rows = slice(first, first + STRIP_ROWS)
        part = scale[rows]
        scales = part.to(torch.float32) if part.dtype == FP8 else _powers_of_two(part)
        scales = scales / factor if is_inverse else scales * factor
        values = _e2m1_values(packed[rows])
        result[rows] = values * scales.repeat_interleave(run, 1)
    return result


def _e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """Returns the 4-bit floats of packed bytes, [..., 2 * n] float32, lower halves first."""
    table = torch.tensor(E2M1_VALUES, device=packed.device)
    return table[torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).int()]


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Returns the float32 values of unsigned exponent bytes; 255 is NaN."""
    return exponents.view(E8M0).to(torch.float32)


def round_to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a matrix [N, K] as FP8, and the scales of its rows, [N, 1] float32."""
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
    for first in range(0, len(weight), STRIP_ROWS):
        rows = slice(first, first + STRIP_ROWS)
        part = weight[rows].to(torch.float32)
        scale[rows] = part.abs().amax(1, keepdim=True).clamp(min=SMALLEST_AMAX) / FP8_MAX
        values[rows] = (part / scale[rows]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return values, scale


def rounded_to_fp8(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a matrix [N, K] of `dtype` with the values that FP8 with scales by row keeps."""
    return dequantize_fp8(*round_to_fp8(weight), None, dtype)
