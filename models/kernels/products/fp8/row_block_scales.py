"""Scales of blocks of FP8 weights in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def keep_row_scales(table, scale_ptr, row_block, NUM_BLOCKS: gl.constexpr):
    """Copies the scales of a block of rows to shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    blocks = gl.arange(0, table.shape[0], layout)
    scale_ptr += row_block * NUM_BLOCKS
    table.store(gl.load(scale_ptr + gl.minimum(blocks, NUM_BLOCKS - 1)))
