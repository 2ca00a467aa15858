"""Products with one tile for every number of tokens, of any dtype and on any GPU."""

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
_DEPTHS = {1: 128, 2: 64, 4: 32, 8: 16}
"""Inputs of a tile by bytes of an element; 128 are a block of FP8 weights."""


@triton.jit(do_not_specialize=["num_tokens"])
def _fixed_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, output_ptr, num_tokens,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr, DEPTH: tl.constexpr, HAS_SCALES: tl.constexpr, IS_BLOCKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiplies OUTPUTS rows of the weight with TOKENS tokens, tile after tile of the inputs."""
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_output, is_token = outputs < NUM_OUTPUTS, tokens < num_tokens
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * NUM_INPUTS
    x_ptrs = x_ptr + tokens.to(tl.int64)[None, :] * NUM_INPUTS
    NUM_TILES: tl.constexpr = (NUM_INPUTS + DEPTH - 1) // DEPTH
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for tile in range(NUM_TILES):
        depth = tile * DEPTH + tl.arange(0, DEPTH)
        is_input = depth < NUM_INPUTS
        in_weight, in_x = is_output[:, None] & is_input[None, :], is_input[:, None] & is_token[None]
        weight = tl.load(weight_ptrs + depth[None, :], mask=in_weight, other=0.0)
        x = tl.load(x_ptrs + depth[:, None], mask=in_x, other=0.0)
        if HAS_SCALES:
            # Tensor cores add FP8 products in fewer than 32 bits: one sum for each tile.
            product = tl.dot(weight, x)
            if IS_BLOCKED:
                at_scale = outputs // DEPTH * NUM_TILES + tile
                scale = tl.load(weight_scale_ptr + at_scale, mask=is_output, other=0.0)
                x_scale = tl.load(x_scale_ptr + tokens * NUM_TILES + tile, mask=is_token, other=0.0)
                product = product * scale[:, None] * x_scale[None, :]
            total += product
        else:
            total = tl.dot(weight, x, total, input_precision="ieee")
    if HAS_SCALES and not IS_BLOCKED:
        scale = tl.load(weight_scale_ptr + outputs, mask=is_output, other=0.0)
        x_scale = tl.load(x_scale_ptr + tokens, mask=is_token, other=0.0)
        total = total * scale[:, None] * x_scale[None, :]
    at_output = tokens.to(tl.int64)[None, :] * NUM_OUTPUTS + outputs[:, None]
    in_output = is_output[:, None] & is_token[None, :]
    tl.store(output_ptr + at_output, total.to(output_ptr.dtype.element_ty), mask=in_output)


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    is_blocked: bool = False,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns x @ weight^T, [T, N] of `dtype`, with each sum in the order of the inputs.

    Args:
        x: [T, K], contiguous.
        weight: [N, K], contiguous, of x's dtype.
        x_scale: float32, of FP8 factors: [T, 1], or [T, ceil(K / 128)] if is_blocked.
        weight_scale: float32: [N, 1], or [ceil(N / 128), ceil(K / 128)] if is_blocked.
        is_blocked: whether scales are those of blocks of 128.
        dtype: of the result.
    """
    (num_tokens, num_inputs), num_outputs = x.shape, weight.shape[0]
    output = torch.empty((num_tokens, num_outputs), dtype=dtype, device=x.device)
    if not num_tokens:
        return output
    grid = (triton.cdiv(num_outputs, _OUTPUTS), triton.cdiv(num_tokens, _TOKENS))
    _fixed_kernel[grid](
        x, x if x_scale is None else x_scale, weight,
        weight if weight_scale is None else weight_scale, output, num_tokens,
        NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, OUTPUTS=_OUTPUTS, TOKENS=_TOKENS,
        DEPTH=_DEPTHS[x.itemsize], HAS_SCALES=x_scale is not None, IS_BLOCKED=is_blocked,
        num_warps=4, num_stages=3, **launch_options(x.device),
    )  # fmt: skip
    return output
