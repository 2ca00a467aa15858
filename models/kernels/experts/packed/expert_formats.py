"""Converts tiles of 4-bit expert weights to a dtype that products take.

models.ops.experts.expert_formats describes the formats.
"""

import triton
import triton.language as tl

from models.kernels.products.packed.packed_floats import float_of
from models.number_formats import MXFP4_RUN
from models.operands.run_scales import RUNS

RUN = tl.constexpr(MXFP4_RUN)
RUN_HALVES = tl.constexpr(MXFP4_RUN // 4)
WORD_RUNS = tl.constexpr(RUNS)


@triton.jit
def float_scale(exponents):
    """Returns the scales of values of `float_of` in float32, given MXFP4's exponent bytes.

    Exponents are clamped to 113; no other format could hold a model with larger ones.
    """
    bits = (tl.minimum(exponents.to(tl.int32), 240) + 14) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _values(packed, exponents, DTYPE: tl.constexpr):
    """Returns the values of halves of words in kernel order, given the exponent of each half."""
    WEIGHT_ROWS: tl.constexpr = packed.shape[0]
    NUM_HALVES: tl.constexpr = packed.shape[1]
    scale = float_scale(exponents)
    halves = packed.to(tl.int32)
    first = tl.join(
        (float_of(halves, 0) * scale).to(DTYPE), (float_of(halves, 1) * scale).to(DTYPE)
    )
    second = tl.join(
        (float_of(halves, 2) * scale).to(DTYPE), (float_of(halves, 3) * scale).to(DTYPE)
    )
    # From words, their halves, and two dimensions of a half's numbers to columns.
    each: tl.constexpr = [WEIGHT_ROWS, NUM_HALVES // RUN_HALVES, 4, 2, 2, 2]
    values = tl.join(first, second).reshape(each).permute(0, 1, 5, 4, 2, 3)
    return values.reshape(WEIGHT_ROWS, 4 * NUM_HALVES)


@triton.jit
def mxfp4_product(
    x_rows, is_row, weight_ptr, scale_ptr, expert, weight_rows, scale_rows, is_weight_row,
    NUM_ROWS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WEIGHT_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Returns rows of x times rows of an MXFP4 matrix: [ROWS, WEIGHT_ROWS] float32.

    x_rows: [ROWS], pointers to rows of SIZE elements.
    weight_ptr, scale_ptr: all experts' matrices, as halves of words, and scales, stacked.
    expert: int64, the matrix, of NUM_ROWS rows.
    weight_rows, scale_rows: [WEIGHT_ROWS] int32, rows of the matrix, and of its scales in tile
        order.
    is_row, is_weight_row: whether a row exists.
    DEPTH: elements of a row that are multiplied at a time, a multiple of 32.
    """
    acc = tl.zeros([ROWS, WEIGHT_ROWS], tl.float32)
    runs: tl.constexpr = DEPTH // RUN
    num_halves: tl.constexpr = runs * RUN_HALVES
    num_words: tl.constexpr = (SIZE // RUN + 2 * WORD_RUNS - 1) // (2 * WORD_RUNS) * 2
    weight_ptr += expert * (NUM_ROWS * (SIZE // 4))
    scale_ptrs = scale_ptr + expert * (num_words * NUM_ROWS * WORD_RUNS)
    scale_ptrs += scale_rows[:, None] * WORD_RUNS
    run = tl.arange(0, runs)[None, :]
    is_run = is_weight_row[:, None] & (run < SIZE // RUN)
    at_run = run // WORD_RUNS * (NUM_ROWS * WORD_RUNS) + run % WORD_RUNS
    next_exponents = tl.load(scale_ptrs + at_run, mask=is_run, other=0)
    for first in range(0, SIZE, DEPTH):
        # Scales are too small for an asynchronous copy: read them one round ahead.
        exponents = next_exponents
        run += runs
        is_run = is_weight_row[:, None] & (run < SIZE // RUN)
        at_run = run // WORD_RUNS * (NUM_ROWS * WORD_RUNS) + run % WORD_RUNS
        next_exponents = tl.load(scale_ptrs + at_run, mask=is_run, other=0)
        depth = first + tl.arange(0, DEPTH)
        in_x = is_row[:, None] & (depth < SIZE)[None, :]
        x = tl.load(x_rows[:, None] + depth[None, :], mask=in_x, other=0.0)
        at_half = first // 4 + tl.arange(0, num_halves)
        in_weight = is_weight_row[:, None] & (at_half < SIZE // 4)[None, :]
        at = weight_rows[:, None] * (SIZE // 4) + at_half[None, :]
        packed = tl.load(weight_ptr + at, mask=in_weight, other=0)
        exponents = exponents[:, :, None].broadcast_to(WEIGHT_ROWS, runs, RUN_HALVES)
        exponents = exponents.reshape(WEIGHT_ROWS, num_halves)
        weight = _values(packed, exponents, x.dtype)
        acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    return acc
