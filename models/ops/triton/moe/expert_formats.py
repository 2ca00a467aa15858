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


def _unpacked(out: str, left_shifts: tuple[int, int]) -> str:
    """Returns instructions that make two bfloat16 of one nibble of each of two spread bytes.

    Shifts move the sign and the other bits to their positions in a bfloat16.
    """
    sign, rest = left_shifts
    return f"""
        shl.b32 sign, bytes, {sign};
        shl.b32 rest, bytes, {rest};
        and.b32 sign, sign, 0x80008000;
        and.b32 rest, rest, 0x01C001C0;
        or.b32 rest, rest, sign;
        mul.bf16x2 rest, rest, unit;
        mul.bf16x2 {out}, rest, scale;
    """


def _of_two_bytes(selector: int, lower: str, upper: str) -> str:
    """Returns instructions for two of four bytes, which `selector` spreads over a register."""
    return (
        f"""
        prmt.b32 bytes, $4, 0, {selector:#x};
        prmt.b32 scale, $5, 0, {selector:#x};
        shl.b32 scale, scale, 7;
        """
        + _unpacked(lower, (12, 6))
        + _unpacked(upper, (8, 2))
    )


_UNPACK = tl.constexpr(
    "{ .reg .b32 bytes, scale, sign, rest, unit; mov.b32 unit, 0x7E807E80;"
    + _of_two_bytes(0x4140, "$0", "$2")
    + _of_two_bytes(0x4342, "$1", "$3")
    + "}"
)
"""Converts four bytes and their exponents to eight bfloat16, two at a time.

The bits of an element, moved to the exponent and mantissa of a bfloat16, make it 2**126 (unit) too
small, also where it is subnormal.
"""


@triton.jit
def _numbers(packed, exponents, DTYPE: tl.constexpr, IS_HOPPER: tl.constexpr):
    """Returns the even and the odd elements of packed bytes, given the exponent of each byte."""
    if IS_HOPPER and DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r,r", [packed, exponents],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        scale = e2m1_scale(exponents)
        nibbles = packed.to(tl.int32)
        return (e2m1(nibbles & 0xF) * scale).to(DTYPE), (e2m1(nibbles >> 4) * scale).to(DTYPE)


@triton.jit
def mxfp4_product(
    x_rows, is_row, weight_ptr, scale_ptr, weight_rows, is_weight_row, SIZE: tl.constexpr,
    ROWS: tl.constexpr, WEIGHT_ROWS: tl.constexpr, DEPTH: tl.constexpr, IS_HOPPER: tl.constexpr,
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
        even, odd = _numbers(packed, exponents, x.dtype, IS_HOPPER)
        weight = tl.join(even, odd).reshape(WEIGHT_ROWS, DEPTH)
        acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    return acc
