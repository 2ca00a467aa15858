"""Computes the slots of a step's tokens in one kernel."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.launch import Launch

_BLOCK = 128


# Specialising on what varies from step to step would compile again while serving.
@triton.jit(do_not_specialize=["tables_ptr", "table_stride", "num_tokens"])
def _slot_mapping_kernel(
    tables_ptr, token_request_ptr, positions_ptr, slots_ptr, table_stride, num_tokens,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, KEEPS_NULL_BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    request = tl.load(token_request_ptr + tokens, mask=is_token, other=0).to(tl.int64)
    position = tl.load(positions_ptr + tokens, mask=is_token, other=0)
    at_block = request * table_stride + position // BLOCK_SIZE
    block = tl.load(tables_ptr + at_block, mask=is_token, other=0).to(tl.int64)
    slots = block * BLOCK_SIZE + position % BLOCK_SIZE
    if KEEPS_NULL_BLOCK:
        slots = tl.where((block == 0) & (position >= BLOCK_SIZE), -1, slots)
    tl.store(slots_ptr + tokens, slots, mask=is_token)


def slot_mapping(
    block_tables: torch.Tensor,
    token_request: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    *,
    keeps_null_block: bool = False,
) -> torch.Tensor:
    """Returns [T] int64 slots, block id * block_size + offset.

    block_tables: [R, max_blocks] int32, rows contiguous.
    token_request: [T] int32 or int64, contiguous.
    positions: [T] int64, contiguous, not negative.
    keeps_null_block: tokens in block 0 past the first block_size positions get no slot, -1. Tokens
        of a dummy request would share slots there, and the last to be stored would be by chance.
    """
    num_tokens = positions.shape[0]
    slots = torch.empty_like(positions)
    launch = _launcher(block_size, keeps_null_block, positions.device)
    launch(
        (triton.cdiv(num_tokens, _BLOCK), 1, 1),
        block_tables, token_request, positions, slots, block_tables.stride(0), num_tokens,
    )  # fmt: skip
    return slots


@lru_cache
def _launcher(block_size: int, keeps_null_block: bool, device: torch.device) -> Launch:
    del device
    return Launch(
        _slot_mapping_kernel, BLOCK_SIZE=block_size, BLOCK=_BLOCK,
        KEEPS_NULL_BLOCK=keeps_null_block, num_warps=1,
    )  # fmt: skip
