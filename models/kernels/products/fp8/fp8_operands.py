"""Operands of products in FP8, as the copy engine and the kernels take them."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.number_formats import BLOCK

DEPTH = gl.constexpr(BLOCK)
"""Inputs of a tile: those of one scale, and 128 bytes."""
SCALE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(0, 32, rank=2))
"""Layout of tokens' scales in shared memory."""
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
_MATRIX = gl.NVMMASharedLayout(128, 8, rank=2)
_HALVES = gl.NVMMASharedLayout(128, 8, rank=3)


def described_tokens(rounded: torch.Tensor, num_tokens: int) -> TensorDescriptor:
    """Describes rounded activations [T, K] to the copy engine, in tiles of `num_tokens`."""
    strides = [rounded.shape[1], 1]
    return TensorDescriptor(rounded, [*rounded.shape], strides, [num_tokens, BLOCK], _MATRIX)


def described_scales(scale: torch.Tensor, num_tokens: int) -> TensorDescriptor:
    """Describes the scales of empty_token_scales, a block's of `num_tokens`."""
    (num_rows, num_blocks), stride = scale.shape, scale.stride(1)
    tile = [1, num_tokens]
    return TensorDescriptor(
        scale.t(), [num_blocks, num_rows], [stride, 1], tile, SCALE_LAYOUT.value
    )


def described_weight(weight: torch.Tensor, num_halves: int, num_rows: int) -> TensorDescriptor:
    """Describes a weight [N, K], or its halves, in tiles of `num_rows` of each half."""
    num_outputs, num_inputs = len(weight) // num_halves, weight.shape[1]
    shape, strides = (
        [num_halves, num_outputs, num_inputs],
        [num_outputs * num_inputs, num_inputs, 1],
    )
    return TensorDescriptor(weight, shape, strides, [num_halves, num_rows, BLOCK], _HALVES)
