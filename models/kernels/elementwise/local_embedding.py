"""The embedding of the tokens that one of several ranks holds, in one kernel."""

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


# The ids of a step begin anywhere in a buffer, and each alignment would be a build.
@triton.jit(do_not_specialize=["token_ids_ptr"])
def _local_embedding_kernel(
    token_ids_ptr, weight_ptr, output_ptr,
    FIRST: tl.constexpr, NUM_TOKENS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copies a token's vector, if the token is one of the NUM_TOKENS from FIRST on; else zeros."""
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    token = tl.load(token_ids_ptr + row).to(tl.int64) - FIRST
    is_own = (token >= 0) & (token < NUM_TOKENS)
    vector = tl.load(weight_ptr + token * SIZE + columns, mask=is_column & is_own, other=0.0)
    tl.store(output_ptr + row * SIZE + columns, vector, mask=is_column)


def local_embedding(token_ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Maps [T] ids, contiguous, to [T, H]; see models.ops.elementwise.local_embedding."""
    num_tokens, size = weight.shape
    output = weight.new_empty(token_ids.shape[0], size)
    num_blocks, launch = _launcher(first, num_tokens, size, weight.device)
    launch((token_ids.shape[0], num_blocks, 1), token_ids, weight, output)
    return output


@lru_cache
def _launcher(first: int, num_tokens: int, size: int, device: torch.device) -> tuple[int, Launch]:
    block = min(_BLOCK, triton.next_power_of_2(size))
    launch = Launch(
        _local_embedding_kernel, FIRST=first, NUM_TOKENS=num_tokens, SIZE=size, BLOCK=block,
        num_warps=max(1, block // 256), **launch_options(device),
    )  # fmt: skip
    return triton.cdiv(size, block), launch
