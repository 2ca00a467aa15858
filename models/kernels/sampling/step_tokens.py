"""The tokens of a decode step: one kernel reads them, two choose and write the next ones."""

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
from models.operands.draws import NO_TOKEN

_BLOCK_ROWS = 128
_PART = 4096
"""Logits of one program of a row."""


# Specialising on what varies from step to step would compile again while serving.
@triton.jit(do_not_specialize=["num_rows", "tokens_stride"])
def _last_tokens_kernel(
    tokens_ptr, row_ids_ptr, seq_lens_ptr, input_ids_ptr, positions_ptr, tokens_stride, num_rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < num_rows
    row = tl.load(row_ids_ptr + request, mask=is_request, other=0).to(tl.int64)
    position = tl.load(seq_lens_ptr + request, mask=is_request, other=1).to(tl.int64) - 1
    token = tl.load(tokens_ptr + row * tokens_stride + position, mask=is_request, other=0)
    tl.store(input_ids_ptr + request, token, mask=is_request)
    tl.store(positions_ptr + request, position, mask=is_request)


@triton.jit
def _best_of_part_kernel(
    logits_ptr, best_ptr, ids_ptr, stride, NUM_LOGITS: tl.constexpr, NUM_PARTS: tl.constexpr,
    PART: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = part * PART + tl.arange(0, PART)
    # Loaded at once, which keeps the memory busy.
    logits = tl.load(
        logits_ptr + row * stride + columns, mask=columns < NUM_LOGITS, other=float("-inf")
    ).to(tl.float32)
    # Comparisons with NaN are false, so NaN is never the largest.
    largest = tl.max(tl.where(logits > float("-inf"), logits, float("-inf")), axis=0)
    first = tl.min(tl.where(logits == largest, columns, NUM_LOGITS - 1), axis=0)
    tl.store(best_ptr + row * NUM_PARTS + part, largest)
    tl.store(ids_ptr + row * NUM_PARTS + part, first)


@triton.jit(do_not_specialize=["row_ids_ptr", "positions_ptr", "tokens_stride"])
def _best_of_row_kernel(
    best_ptr, ids_ptr, token_ids_ptr, tokens_ptr, row_ids_ptr, positions_ptr, tokens_stride,
    NUM_LOGITS: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr,
    NO_TOKEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    request = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    at_parts = request.to(tl.int64) * NUM_PARTS + parts
    is_part = parts < NUM_PARTS
    best = tl.load(best_ptr + at_parts, mask=is_part, other=float("-inf"))
    ids = tl.load(ids_ptr + at_parts, mask=is_part, other=NUM_LOGITS - 1)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, ids, NUM_LOGITS - 1), axis=0)
    row = tl.load(row_ids_ptr + request).to(tl.int64)
    position = tl.load(positions_ptr + request)
    # Of NaN alone the largest is -inf.
    is_sound = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(token_ids_ptr + request, tl.where(is_sound, token, NO_TOKEN))
    tl.store(tokens_ptr + row * tokens_stride + position, tl.where(is_sound, token, 0))


def last_tokens(
    tokens: torch.Tensor,
    row_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Finds the last tokens of sequences; see models.ops.sampling.step_tokens.last_tokens."""
    num_rows = row_ids.shape[0]
    _last_tokens_kernel[(triton.cdiv(num_rows, _BLOCK_ROWS),)](
        tokens, row_ids, seq_lens, input_ids, positions, tokens.stride(0), num_rows,
        BLOCK=_BLOCK_ROWS, num_warps=4,
    )  # fmt: skip


def choose_greedily(
    logits: torch.Tensor, tokens: torch.Tensor, row_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Returns each row's most likely token; see models.ops.sampling.step_tokens.choose_greedily.

    A row is split into parts, so that few rows keep the whole device busy too.
    """
    num_rows, num_logits = logits.shape
    num_parts, best_of_part, best_of_row = _launchers(num_logits, logits.device)
    best = logits.new_empty(num_rows, num_parts, dtype=torch.float32)
    ids = torch.empty_like(best, dtype=torch.int32)
    token_ids = torch.empty_like(row_ids)
    best_of_part((num_parts, num_rows, 1), logits, best, ids, logits.stride(0))
    best_of_row(
        (num_rows, 1, 1), best, ids, token_ids, tokens, row_ids, positions, tokens.stride(0)
    )
    return token_ids


@lru_cache
def _launchers(num_logits: int, device: torch.device) -> tuple[int, Launch, Launch]:
    num_parts = triton.cdiv(num_logits, _PART)
    best_of_part = Launch(
        _best_of_part_kernel, NUM_LOGITS=num_logits, NUM_PARTS=num_parts, PART=_PART,
        num_warps=_PART // 1024, **launch_options(device),
    )  # fmt: skip
    best_of_row = Launch(
        _best_of_row_kernel, NUM_LOGITS=num_logits, NUM_PARTS=num_parts,
        BLOCK=triton.next_power_of_2(num_parts), NO_TOKEN=NO_TOKEN, num_warps=1,
        **launch_options(device),
    )  # fmt: skip
    return num_parts, best_of_part, best_of_row
