"""Converts tiles of 4-bit expert weights to a dtype that products take.

models.ops.moe.expert_formats describes the formats.
"""

import triton
import triton.language as tl

from models.number_formats import MXFP4_RUN

RUN = tl.constexpr(MXFP4_RUN)
RUN_BYTES = tl.constexpr(MXFP4_RUN // 2)


@triton.jit
def e2m1(nibbles):
    """Returns 4-bit floats in the lower bits of int32, times 2**-14, in float32.

    Shifted into float16, whose values below 1 are subnormal too, so that no value needs a special
    case.
    """
    bits = ((nibbles & 8) << 12) | ((nibbles & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_scale(exponents):
    """Returns the scales of `e2m1` values in float32, given MXFP4's exponent bytes.

    Exponents are clamped to 113; no other format could hold a model with larger ones.
    """
    bits = (tl.minimum(exponents.to(tl.int32), 240) + 14) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _values(packed, exponents, DTYPE: tl.constexpr):
    """Returns the values of bytes in kernel order, given the exponent of each byte."""
    WEIGHT_ROWS: tl.constexpr = packed.shape[0]
    NUM_BYTES: tl.constexpr = packed.shape[1]
    scale = e2m1_scale(exponents)
    nibbles = packed.to(tl.int32)
    halves = (e2m1(nibbles & 0xF) * scale).to(DTYPE), (e2m1(nibbles >> 4) * scale).to(DTYPE)
    # From words, their bytes and halves of these to columns.
    bytes_of: tl.constexpr = [WEIGHT_ROWS, NUM_BYTES // RUN_BYTES, 4, 2, 2, 2]
    values = tl.join(halves[0], halves[1]).reshape(bytes_of).permute(0, 1, 4, 5, 2, 3)
    return values.reshape(WEIGHT_ROWS, 2 * NUM_BYTES)


@triton.jit
def mxfp4_product(
    x_rows, is_row, weight_ptr, scale_ptr, weight_rows, is_weight_row, SIZE: tl.constexpr,
    ROWS: tl.constexpr, WEIGHT_ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Returns rows of x times rows of MXFP4 matrices: [ROWS, WEIGHT_ROWS] float32.

    x_rows: [ROWS], pointers to rows of SIZE elements.
    weight_ptr, scale_ptr: all experts' matrices and scales, stacked.
    weight_rows: [WEIGHT_ROWS] int64, rows of those matrices.
    is_row, is_weight_row: whether a row exists.
    DEPTH: elements of a row that are multiplied at a time, a multiple of 32.
    """
    acc = tl.zeros([ROWS, WEIGHT_ROWS], tl.float32)
    runs: tl.constexpr = DEPTH // RUN
    num_bytes: tl.constexpr = runs * RUN_BYTES
    scale_ptrs = scale_ptr + weight_rows[:, None] * (SIZE // RUN) + tl.arange(0, runs)[None, :]
    is_run = tl.arange(0, runs)[None, :] < SIZE // RUN
    next_exponents = tl.load(scale_ptrs, mask=is_weight_row[:, None] & is_run, other=0)
    for first in range(0, SIZE, DEPTH):
        # Scales are too small for an asynchronous copy: read them one round ahead.
        exponents = next_exponents
        next_run = first // RUN + runs
        is_run = tl.arange(0, runs)[None, :] + next_run < SIZE // RUN
        next_exponents = tl.load(
            scale_ptrs + next_run, mask=is_weight_row[:, None] & is_run, other=0
        )
        depth = first + tl.arange(0, DEPTH)
        in_x = is_row[:, None] & (depth < SIZE)[None, :]
        x = tl.load(x_rows[:, None] + depth[None, :], mask=in_x, other=0.0)
        at_byte = first // 2 + tl.arange(0, num_bytes)
        in_weight = is_weight_row[:, None] & (at_byte < SIZE // 2)[None, :]
        at = weight_rows[:, None] * (SIZE // 2) + at_byte[None, :]
        packed = tl.load(weight_ptr + at, mask=in_weight, other=0)
        exponents = exponents[:, :, None].broadcast_to(WEIGHT_ROWS, runs, RUN_BYTES)
        exponents = exponents.reshape(WEIGHT_ROWS, num_bytes)
        weight = _values(packed, exponents, x.dtype)
        acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    return acc
