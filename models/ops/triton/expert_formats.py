"""Tiles of expert weights that stay in 8 or 4 bits, as numbers that a product takes.

models.ops.expert_formats says what the formats are.
"""

import triton
import triton.language as tl

NAMES = {"float8_e4m3fn": "fp8", "uint8": "mxfp4"}
"""Of the formats, by the dtype of weights; kernels are compiled for one of them."""

FP8_BLOCK = tl.constexpr(128)
RUN_BYTES = tl.constexpr(16)


@triton.jit
def e2m1(nibbles):
    """Returns what 4-bit floats in the lower bits of int32 mean, times 2**-14, in float32.

    As a half with as many of its exponent and mantissa bits; smaller ones than 1 are subnormal in
    both, and no multiplication has to treat them apart.
    """
    bits = ((nibbles & 8) << 12) | ((nibbles & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_scale(exponents):
    """Returns the scales of `e2m1` values in float32, given MXFP4's exponent bytes.

    Up to 2**113; a model with larger ones would not fit into any other format.
    """
    bits = (tl.minimum(exponents.to(tl.int32), 240) + 14) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def row_product(
    x_rows, is_row, weight_ptr, scale_ptr, expert, N: tl.constexpr, PARTS: tl.constexpr,
    rows, is_weight_row, SIZE: tl.constexpr, ROWS: tl.constexpr, WEIGHT_ROWS: tl.constexpr,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Returns rows of one expert's matrix times rows of x: [WEIGHT_ROWS, ROWS] float32.

    The weights stand left: there the tensor cores take what was just computed from registers.

    Args:
        x_rows: pointers to rows of x, [ROWS], each of SIZE numbers.
        is_row: [ROWS], which of them there are.
        weight_ptr: all experts' matrices.
        scale_ptr: and their scales.
        expert: which one, int64.
        N: rows of a matrix.
        PARTS: matrices that are one above the other in it.
        rows: of the matrix, [WEIGHT_ROWS].
        is_weight_row: which of them there are.
        SIZE: numbers in a row.
        ROWS: of x.
        WEIGHT_ROWS: of the weight.
        DEPTH: numbers of a row that are multiplied at a time, a multiple of 32, for FP8 of 128.
        FORMAT: one of NAMES.
    """
    acc = tl.zeros([WEIGHT_ROWS, ROWS], tl.float32)
    weight_rows = (expert * N + rows)[:, None]
    if FORMAT == "fp8":
        tl.static_assert(DEPTH == FP8_BLOCK)
        blocks: tl.constexpr = (SIZE + FP8_BLOCK - 1) // FP8_BLOCK
        part_rows: tl.constexpr = N // PARTS
        part_blocks: tl.constexpr = (part_rows + FP8_BLOCK - 1) // FP8_BLOCK
        row_block = rows // part_rows * part_blocks + rows % part_rows // FP8_BLOCK
        scale_ptrs = scale_ptr + (expert * PARTS * part_blocks + row_block) * blocks
        for block in range(blocks):
            depth = block * FP8_BLOCK + tl.arange(0, FP8_BLOCK)
            is_depth = depth < SIZE
            in_x = is_row[None, :] & is_depth[:, None]
            in_weight = is_weight_row[:, None] & is_depth[None, :]
            x = tl.load(x_rows[None, :] + depth[:, None], mask=in_x, other=0.0)
            at = weight_rows * SIZE + depth[None, :]
            weight = tl.load(weight_ptr + at, mask=in_weight, other=0.0)
            scale = tl.load(scale_ptrs + block, mask=is_weight_row, other=0.0)
            # FP8 is exact in every dtype of x; the scale would not be.
            acc += tl.dot(weight.to(x.dtype), x, input_precision="ieee") * scale[:, None]
    else:
        runs: tl.constexpr = DEPTH // 32
        num_bytes: tl.constexpr = runs * RUN_BYTES
        inside = tl.arange(0, num_bytes)
        # Byte j of a run holds numbers j and j + 16.
        lower_inside = inside // RUN_BYTES * 32 + inside % RUN_BYTES
        for first in range(0, SIZE // 2, num_bytes):
            at_byte = first + inside
            at_run = tl.arange(0, runs) + first // RUN_BYTES
            depth = 2 * first + lower_inside
            is_byte, is_run = at_byte < SIZE // 2, at_run < SIZE // 32
            in_x = is_row[None, :] & is_byte[:, None]
            x_lower = tl.load(x_rows[None, :] + depth[:, None], mask=in_x, other=0.0)
            x_upper = tl.load(x_rows[None, :] + (depth + 16)[:, None], mask=in_x, other=0.0)
            in_weight = is_weight_row[:, None] & is_byte[None, :]
            at = weight_rows * (SIZE // 2) + at_byte[None, :]
            packed = tl.load(weight_ptr + at, mask=in_weight, other=0)
            in_scale = is_weight_row[:, None] & is_run[None, :]
            at = weight_rows * (SIZE // 32) + at_run[None, :]
            exponents = tl.load(scale_ptr + at, mask=in_scale, other=0)
            scale = e2m1_scale(exponents)[:, :, None].broadcast_to(WEIGHT_ROWS, runs, RUN_BYTES)
            scale = scale.reshape(WEIGHT_ROWS, num_bytes)
            packed = packed.to(tl.int32)
            lower = (e2m1(packed & 0xF) * scale).to(x_lower.dtype)
            upper = (e2m1(packed >> 4) * scale).to(x_upper.dtype)
            acc = tl.dot(lower, x_lower, acc, input_precision="ieee")
            acc = tl.dot(upper, x_upper, acc, input_precision="ieee")
    return acc
