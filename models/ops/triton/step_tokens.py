"""The tokens of a decode step: one kernel to read them, two to choose and write the next ones."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.ops.sample_tokens import NO_TOKEN
from models.ops.triton.launch import Launch

_BLOCK_ROWS = 128
_BLOCK_LOGITS = 1024
_MAX_SPLITS = 128
_NUM_PROGRAMS = 512
"""Programs of one launch over logits, four for each multiprocessor of an H200."""


# Specialising on what varies from step to step would compile again while serving.
@triton.jit(do_not_specialize=["num_rows", "tokens_stride"])
def _last_tokens_kernel(
    tokens_ptr, row_ids_ptr, seq_lens_ptr, input_ids_ptr, positions_ptr, tokens_stride, num_rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Does BLOCK sequences."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < num_rows
    row = tl.load(row_ids_ptr + request, mask=is_request, other=0).to(tl.int64)
    position = tl.load(seq_lens_ptr + request, mask=is_request, other=1).to(tl.int64) - 1
    token = tl.load(tokens_ptr + row * tokens_stride + position, mask=is_request, other=0)
    tl.store(input_ids_ptr + request, token, mask=is_request)
    tl.store(positions_ptr + request, position, mask=is_request)


@triton.jit
def _best_of_part_kernel(
    logits_ptr, best_ptr, ids_ptr, stride, NUM_LOGITS: tl.constexpr, PART: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the largest of PART logits of one row; each lane keeps the first of its own."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * PART + tl.arange(0, BLOCK)
    end = tl.minimum(part * PART + PART, NUM_LOGITS)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = columns
    for _ in range(0, PART, BLOCK):
        logits = tl.load(
            logits_ptr + row * stride + columns, mask=columns < end, other=float("-inf")
        ).to(tl.float32)
        is_better = logits > best
        best = tl.where(is_better, logits, best)
        ids = tl.where(is_better, columns, ids)
        columns += BLOCK
    largest = tl.max(best, axis=0)
    first = tl.min(tl.where(best == largest, ids, NUM_LOGITS - 1), axis=0)
    tl.store(best_ptr + row * NUM_PARTS + part, largest)
    tl.store(ids_ptr + row * NUM_PARTS + part, first)


@triton.jit(do_not_specialize=["row_ids_ptr", "positions_ptr", "tokens_stride"])
def _best_of_row_kernel(
    best_ptr, ids_ptr, token_ids_ptr, tokens_ptr, row_ids_ptr, positions_ptr, tokens_stride,
    NUM_PARTS: tl.constexpr, NUM_LOGITS: tl.constexpr, NO_TOKEN: tl.constexpr,
):  # fmt: skip
    """Finds the largest of a row's parts and writes its token."""
    request = tl.program_id(0)
    parts = request.to(tl.int64) * NUM_PARTS + tl.arange(0, NUM_PARTS)
    best = tl.load(best_ptr + parts)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, tl.load(ids_ptr + parts), NUM_LOGITS - 1), axis=0)
    row = tl.load(row_ids_ptr + request).to(tl.int64)
    position = tl.load(positions_ptr + request)
    # Of NaN alone the largest is -inf: no comparison with it holds.
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
    """Finds the last tokens of sequences; see models.ops.step_tokens.last_tokens."""
    num_rows = row_ids.shape[0]
    _last_tokens_kernel[(triton.cdiv(num_rows, _BLOCK_ROWS),)](
        tokens, row_ids, seq_lens, input_ids, positions, tokens.stride(0), num_rows,
        BLOCK=_BLOCK_ROWS, num_warps=4,
    )  # fmt: skip


def choose_greedily(
    logits: torch.Tensor, tokens: torch.Tensor, row_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Returns each row's most likely token; see models.ops.step_tokens.choose_greedily.

    A row is split into parts, so that a few rows keep the whole device busy too.
    """
    num_rows, num_logits = logits.shape
    num_parts = triton.next_power_of_2(max(1, _NUM_PROGRAMS // num_rows))
    num_parts = min(num_parts, _MAX_SPLITS)
    part = triton.cdiv(triton.cdiv(num_logits, num_parts), _BLOCK_LOGITS) * _BLOCK_LOGITS
    best = logits.new_empty(num_rows, num_parts, dtype=torch.float32)
    ids = torch.empty_like(best, dtype=torch.int32)
    token_ids = torch.empty_like(row_ids)
    of_part, of_row = _best_launchers(num_logits, part, num_parts, logits.device)
    of_part((num_rows, num_parts, 1), logits, best, ids, logits.stride(0))
    of_row((num_rows, 1, 1), best, ids, token_ids, tokens, row_ids, positions, tokens.stride(0))
    return token_ids


@lru_cache
def _best_launchers(
    num_logits: int, part: int, num_parts: int, device: torch.device
) -> tuple[Launch, Launch]:
    del device
    return (
        Launch(
            _best_of_part_kernel, NUM_LOGITS=num_logits, PART=part, NUM_PARTS=num_parts,
            BLOCK=_BLOCK_LOGITS, num_warps=4,
        ),
        Launch(
            _best_of_row_kernel, NUM_PARTS=num_parts, NUM_LOGITS=num_logits, NO_TOKEN=NO_TOKEN,
            num_warps=1,
        ),
    )  # fmt: skip
