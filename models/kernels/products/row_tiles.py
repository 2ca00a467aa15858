"""Tiles of 64 rows of a weight that a warp group multiplies, loaded, gated and stored.

Rows of a gated product alternate: eight of the gate, eight of up, so that the threads that hold one
hold the other.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.kernels.launching.gluon_names import load_box, reinterpret
from models.kernels.products.gate import gated
from models.kernels.tuning.tiles import GROUP_ROWS


def described_rows(weight: torch.Tensor, num_columns: int, *, is_gated: bool) -> TensorDescriptor:
    """Describes tiles of 64 rows and `num_columns` of the weight's elements to the copy engine."""
    num_rows, width = weight.shape
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=num_columns * weight.element_size(),
        element_bitwidth=8 * weight.element_size(),
        rank=4 if is_gated else 2,
    )
    if not is_gated:
        return TensorDescriptor(
            weight, [num_rows, width], [width, 1], [GROUP_ROWS, num_columns], layout
        )
    return TensorDescriptor(
        weight,
        [num_rows // 16, 2, 8, width],
        [8 * width, num_rows // 2 * width, width, 1],
        [4, 2, 8, num_columns],
        layout,
    )


@gluon.jit
def load_rows(weight, target, ready, row, column):
    """Starts loading a tile that begins at `row`, among alternating ones if the weight is gated."""
    if len(weight.block_shape) == 4:
        turns = reinterpret(target, weight.dtype, weight.block_shape, weight.layout)
        load_box(weight, [row // 16, 0, 0, column], ready, turns)
    else:
        load_box(weight, [row, column], ready, target)


@gluon.jit
def gate_rows(sums, dtype: gl.constexpr, ROUNDS: gl.constexpr):
    """Returns silu(gate) * up, [32, tokens], of alternating rows."""
    eights = sums.reshape([4, 2, 8, sums.shape[1]]).permute((0, 2, 3, 1))
    gate, up = eights.reshape([32, sums.shape[1], 2]).split()
    return gated(gate, up, dtype, ROUNDS)


@gluon.jit
def store_rows(sums, output_ptr, first_row, first_token, num_tokens, NUM_OUTPUTS: gl.constexpr):
    """Stores [rows, tokens] to an output [T, N]."""
    NUM_ROWS: gl.constexpr = sums.shape[0]
    THREADS: gl.constexpr = NUM_ROWS // 8
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [THREADS, 32 // THREADS], [1, 4], [0, 1])
    sums = gl.convert_layout(sums.to(output_ptr.dtype.element_ty), layout)
    rows = first_row + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, layout))
    tokens = first_token + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    in_output = (rows < NUM_OUTPUTS)[:, None] & (tokens < num_tokens)[None, :]
    at = tokens.to(gl.int64)[None, :] * NUM_OUTPUTS + rows[:, None]
    gl.store(output_ptr + at, sums, mask=in_output)
