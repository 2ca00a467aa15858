"""Experts for few tokens whose weights stay in 8 or 4 bits; see moe_pairs for the rest.

Tiles have a dimension of their own for the numbers that share a scale.
"""

import torch
import triton
import triton.language as tl

from models.ops.experts import ExpertWeights
from models.ops.triton.expert_formats import FP8_BLOCK, RUN_BYTES, e2m1, e2m1_scale
from models.ops.triton.moe_grouped_quantized import format_name
from models.ops.triton.swiglu import gated

_COLUMNS = 4
_MOST_DEPTH = 2048


@triton.jit
def _zeros(COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr):
    """Returns what `_add_products` adds to."""
    if FORMAT == "fp8":
        return tl.zeros([COLUMNS, DEPTH // FP8_BLOCK, FP8_BLOCK], tl.float32)
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return tl.zeros([COLUMNS, DEPTH // 32, RUN_BYTES], tl.float32)


@triton.jit
def _add_products(
    acc, x_ptr, factor, weight_ptr, scale_ptr, matrix, columns, is_column, N: tl.constexpr,
    SIZE: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Adds products of rows of a matrix with one row of x times a factor, not yet summed up.

    Args:
        acc: as `_zeros` makes it.
        x_ptr: SIZE numbers.
        factor: of all products.
        weight_ptr: stacked matrices, each of N rows of SIZE numbers.
        scale_ptr: and their scales.
        matrix: which of them, int64.
        columns: neighbouring rows of it, [COLUMNS]; they lie in one block.
        is_column: which of them there are.
        N: as above.
        SIZE: as above.
        DEPTH: numbers of a row that are read at a time.
        FORMAT: one of expert_formats.NAMES.
    """
    rows = (matrix * N + columns)[:, None, None]
    is_row = is_column[:, None, None]
    blocks: tl.constexpr = (SIZE + FP8_BLOCK - 1) // FP8_BLOCK
    block_rows: tl.constexpr = (N + FP8_BLOCK - 1) // FP8_BLOCK
    scale_row = matrix * block_rows + tl.min(columns, 0) // FP8_BLOCK
    for first in tl.static_range(0, SIZE, DEPTH):
        if FORMAT == "fp8":
            block = (tl.arange(0, DEPTH // FP8_BLOCK) + first // FP8_BLOCK)[None, :, None]
            depth = block * FP8_BLOCK + tl.arange(0, FP8_BLOCK)[None, None, :]
            is_depth = depth < SIZE
            weight = tl.load(weight_ptr + rows * SIZE + depth, mask=is_row & is_depth, other=0.0)
            x = tl.load(x_ptr + depth, mask=is_depth, other=0.0).to(tl.float32)
            scale = tl.load(scale_ptr + scale_row * blocks + block, mask=block < blocks, other=0.0)
            acc += weight.to(tl.float32) * (x * (scale * factor))
        else:
            run = (tl.arange(0, DEPTH // 32) + first // 32)[None, :, None]
            inside = tl.arange(0, RUN_BYTES)[None, None, :]
            is_run = run < SIZE // 32
            at_byte = rows * (SIZE // 2) + run * RUN_BYTES + inside
            packed = tl.load(weight_ptr + at_byte, mask=is_row & is_run, other=0).to(tl.int32)
            at_run = rows * (SIZE // 32) + run
            exponents = tl.load(scale_ptr + at_run, mask=is_row & is_run, other=0)
            x_ptrs = x_ptr + run * 32 + inside
            lower = tl.load(x_ptrs, mask=is_run, other=0.0).to(tl.float32)
            upper = tl.load(x_ptrs + RUN_BYTES, mask=is_run, other=0.0).to(tl.float32)
            products = e2m1(packed & 0xF) * lower + e2m1(packed >> 4) * upper
            acc += products * (e2m1_scale(exponents) * factor)
    return acc


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, experts_ptr, output_ptr, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Computes COLUMNS inner features of one pair, gated."""
    # Pairs come first: those of one expert read the same weights at the same time.
    pair = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < INNER
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    x_ptr += (pair // TOP_K).to(tl.int64) * HIDDEN
    gate = _add_products(
        _zeros(COLUMNS, DEPTH, FORMAT), x_ptr, 1.0, weight_ptr, scale_ptr, expert * 2,
        columns, is_column, INNER, HIDDEN, DEPTH, FORMAT,
    )  # fmt: skip
    up = _add_products(
        _zeros(COLUMNS, DEPTH, FORMAT), x_ptr, 1.0, weight_ptr, scale_ptr, expert * 2 + 1,
        columns, is_column, INNER, HIDDEN, DEPTH, FORMAT,
    )  # fmt: skip
    gate = tl.sum(tl.sum(gate, 2), 1)
    up = tl.sum(tl.sum(up, 2), 1)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * 2 * INNER + columns
        gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)
        up += tl.load(bias_ptrs + INNER, mask=is_column, other=0.0).to(tl.float32)
    result = gated(gate, up, alpha, limit, IS_CLAMPED)
    at = pair.to(tl.int64) * INNER + columns
    tl.store(output_ptr + at, result.to(output_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _down_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, experts_ptr, factors_ptr, output_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Computes COLUMNS output features of one token, all its experts added up."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    acc = _zeros(COLUMNS, DEPTH, FORMAT)
    biases = tl.zeros([COLUMNS], tl.float32)
    # Unrolled, here and above, so that many reads are under way at once.
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        factor = tl.load(factors_ptr + pair)
        acc = _add_products(
            acc, x_ptr + pair * INNER, factor, weight_ptr, scale_ptr, expert, columns, is_column,
            HIDDEN, INNER, DEPTH, FORMAT,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * HIDDEN + columns, mask=is_column, other=0.0)
            biases += bias.to(tl.float32) * factor
    result = tl.sum(tl.sum(acc, 2), 1) + biases
    at = token * HIDDEN + columns
    tl.store(output_ptr + at, result.to(output_ptr.dtype.element_ty), mask=is_column)


def apply_pairs_quantized(
    hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Does what models.ops.triton.moe.apply_experts says; hidden is contiguous."""
    (num_tokens, hidden_size), inner = hidden.shape, experts.inner_size
    num_pairs = ids.numel()
    between = hidden.new_empty(num_pairs, inner)
    output = torch.empty_like(hidden)
    # Without biases the kernels do not touch them; any tensor will do.
    gate_up_bias, down_bias = experts.gate_up_bias, experts.down_bias
    if gate_up_bias is None or down_bias is None:
        gate_up_bias = down_bias = weights
    shape = {
        "HIDDEN": hidden_size, "INNER": inner, "TOP_K": ids.shape[1],
        "HAS_BIAS": experts.gate_up_bias is not None, "COLUMNS": _COLUMNS,
        "FORMAT": format_name(experts), "num_warps": 4,
    }  # fmt: skip
    _gate_up_kernel[(num_pairs, triton.cdiv(inner, _COLUMNS))](
        hidden, experts.gate_up, experts.gate_up_scale, gate_up_bias, ids, between,
        experts.alpha, experts.limit or 0.0,
        IS_CLAMPED=experts.limit is not None, DEPTH=_depth(hidden_size), **shape,
    )  # fmt: skip
    _down_kernel[(num_tokens, triton.cdiv(hidden_size, _COLUMNS))](
        between, experts.down, experts.down_scale, down_bias, ids, weights, output,
        DEPTH=_depth(inner), **shape,
    )  # fmt: skip
    return output


def _depth(size: int) -> int:
    """Returns how much of each row is read at once."""
    power: int = triton.next_power_of_2(size)
    return max(128, min(_MOST_DEPTH, power))
