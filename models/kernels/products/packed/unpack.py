"""Converts packed weights to the values that products of many tokens take, in one kernel."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.products.packed.packed_floats import float_of
from models.operands.packed_weights import (
    bits_of,
    columns_per_scale,
    has_floats,
    num_columns,
)

_COLUMNS = 256
_ROWS = 8


@triton.jit
def _unpack_kernel(
    word_ptr, scale_ptr, zero_ptr, output_ptr,
    NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    IS_INTEGER: tl.constexpr, NUM_BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes a tile of values; see models.operands.packed_weights for words and halves."""
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_inside = (rows < NUM_ROWS) & (columns < NUM_COLUMNS)
    RUN: tl.constexpr = 128 // NUM_BITS
    at_word = rows * (NUM_COLUMNS // RUN * 4) + columns // RUN * 4 + columns % 8 // 2
    words = tl.load(word_ptr + at_word, mask=is_inside, other=0)
    halves = words >> columns % 2 * 16
    number = columns % RUN // 16 * 2 + columns % 16 // 8
    at_group = rows * (NUM_COLUMNS // GROUP) + columns // GROUP
    if IS_INTEGER:
        q = halves >> number * NUM_BITS & (1 << NUM_BITS) - 1
        zero = 8
        if NUM_BITS == 8:
            # The eighth bit is the sign.
            q = (q ^ 128) - 128
            zero = 0
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + at_group, mask=is_inside, other=0).to(tl.int32)
        values = (q - zero).to(tl.float32)
    else:
        values = float_of(halves, number) * 16384.0
    scale = tl.load(scale_ptr + at_group, mask=is_inside, other=0.0)
    if scale_ptr.dtype.element_ty == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    values *= scale.to(tl.float32)
    output = output_ptr + rows * NUM_COLUMNS + columns
    tl.store(output, values.to(output_ptr.dtype.element_ty), mask=is_inside)


def unpack(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns models.operands.packed_weights.packed_values, of contiguous tensors."""
    num_rows, columns = len(weight), num_columns(weight)
    output = torch.empty(num_rows, columns, dtype=dtype, device=weight.device)
    group, is_integer = columns_per_scale(weight, scale), not has_floats(weight, scale)
    launch = _launcher(num_rows, columns, group, is_integer, bits_of(weight), weight.device)
    grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(columns, _COLUMNS), 1)
    launch(grid, weight.view(torch.int32), scale, zero, output)
    return output


@lru_cache
def _launcher(
    num_rows: int,
    columns: int,
    group: int,
    is_integer: bool,
    num_bits: int,
    device: torch.device,
) -> Launch:
    return Launch(
        _unpack_kernel, NUM_ROWS=num_rows, NUM_COLUMNS=columns, GROUP=group,
        IS_INTEGER=is_integer, NUM_BITS=num_bits, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
        **launch_options(device),
    )  # fmt: skip
