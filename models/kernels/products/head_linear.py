"""Products of each head with a matrix of its own, with one tile for every number of tokens."""

import torch
import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)

_OUTPUTS = 64
_TOKENS = 64
_DEPTHS = {2: 64, 4: 32, 8: 16}
"""Inputs of a tile by bytes of an element."""


@triton.jit(do_not_specialize=["num_tokens", "x_stride", "output_stride"])
def _head_kernel(
    x_ptr, weight_ptr, output_ptr, num_tokens, x_stride, output_stride,
    X_STEP: tl.constexpr, OUTPUT_STEP: tl.constexpr, HEAD: tl.constexpr, ROW: tl.constexpr,
    COLUMN: tl.constexpr, NUM_INPUTS: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiplies OUTPUTS columns of a head's matrix with TOKENS tokens.

    X_STEP, OUTPUT_STEP: distance of heads of a token. HEAD, ROW, COLUMN: strides of the matrices.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(2)
    is_output, is_token = outputs < NUM_OUTPUTS, tokens < num_tokens
    weight_ptrs = weight_ptr + head * HEAD + outputs[:, None] * COLUMN
    x_ptrs = x_ptr + tokens[None, :] * x_stride + head * X_STEP
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for first in range(0, NUM_INPUTS, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        is_input = depth < NUM_INPUTS
        in_weight, in_x = is_output[:, None] & is_input[None, :], is_input[:, None] & is_token[None]
        weight = tl.load(weight_ptrs + depth[None, :] * ROW, mask=in_weight, other=0.0)
        x = tl.load(x_ptrs + depth[:, None], mask=in_x, other=0.0)
        total = tl.dot(weight, x, total, input_precision="ieee")
    at_output = tokens[None, :] * output_stride + head * OUTPUT_STEP + outputs[:, None]
    in_output = is_output[:, None] & is_token[None, :]
    tl.store(output_ptr + at_output, total.to(output_ptr.dtype.element_ty), mask=in_output)


def head_linear(x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
    """Stores the product of each head, x [T, H, K] and weight [H, K, N], in output [T, H, N].

    Each sum is in the order of the inputs. The elements of a head of x and of the output are
    contiguous; strides of the weight may be any.
    """
    num_tokens, num_heads, num_inputs = x.shape
    num_outputs = output.shape[2]
    if not num_tokens:
        return
    grid = (triton.cdiv(num_outputs, _OUTPUTS), triton.cdiv(num_tokens, _TOKENS), num_heads)
    head, row, column = weight.stride()
    _head_kernel[grid](
        x, weight, output, num_tokens, x.stride(0), output.stride(0), X_STEP=x.stride(1),
        OUTPUT_STEP=output.stride(1), HEAD=head, ROW=row, COLUMN=column, NUM_INPUTS=num_inputs,
        NUM_OUTPUTS=num_outputs, OUTPUTS=_OUTPUTS, TOKENS=_TOKENS, DEPTH=_DEPTHS[x.itemsize],
        num_warps=4, num_stages=3, **launch_options(x.device),
    )  # fmt: skip
