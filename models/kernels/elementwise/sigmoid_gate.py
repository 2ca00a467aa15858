"""Scaling by the sigmoid of a gate."""

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

_BLOCK = 1024


@triton.jit(do_not_specialize=["x_stride", "gate_stride"])
def _sigmoid_gate_kernel(
    x_ptr, gate_ptr, output_ptr, x_stride, gate_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_OF_ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does BLOCK columns of a row; the factor is rounded, as the operator's reference rounds it.

    IS_OF_ROWS: a row has one gate.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    if IS_OF_ROWS:
        gate = tl.load(gate_ptr + row * gate_stride)
    else:
        gate = tl.load(gate_ptr + row * gate_stride + columns, mask=is_column, other=0.0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate.to(tl.float32)).to(gate_ptr.dtype.element_ty).to(tl.float32)
    output = (x * factor).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * SIZE + columns, output, mask=is_column)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Maps x [T, K] and gate to [T, K]; see models.ops.elementwise.sigmoid_gate."""
    num_rows, size = x.shape
    output = x.new_empty(num_rows, size)
    num_blocks, launch = _launcher(size, gate.shape[1] < size, x.device)
    launch((num_rows, num_blocks, 1), x, gate, output, x.stride(0), gate.stride(0))
    return output


@lru_cache
def _launcher(size: int, is_of_rows: bool, device: torch.device) -> tuple[int, Launch]:
    block = min(_BLOCK, triton.next_power_of_2(size))
    launch = Launch(
        _sigmoid_gate_kernel, SIZE=size, BLOCK=block, IS_OF_ROWS=is_of_rows,
        num_warps=max(1, block // 256), **launch_options(device),
    )  # fmt: skip
    return triton.cdiv(size, block), launch
