"""Short causal convolution of each channel, whose last inputs the cache keeps."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kernels.attention.request_search import request_of_tile
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.recurrence.convolution_forms import MOST_FEW, tokens_of_a_program
from models.kernels.recurrence.state_rows import (
    StateForm,
    conv_form,
    conv_offset,
    first_kept,
    first_position,
    request_span,
    slot_ptr,
)
from models.state_cache import StateCacheData

_CHANNELS = 256

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_blocks",
    "num_requests",
]  # fmt: skip  # specialising on these would compile again while serving


@triton.jit
def _load_new(x_ptr, x_stride, tokens, end, start, first, lane, form: tl.constexpr):
    """Returns the step's inputs of tokens [N, 1] from `start` to `end`, channels first + lane."""
    is_new = (tokens >= start) & (tokens < end) & (first + lane < form.columns)
    x_ptrs = x_ptr + tokens.to(tl.int64) * x_stride + first + lane
    return tl.load(x_ptrs, mask=is_new, other=0.0).to(tl.float32)


@triton.jit
def _load_kept(
    memory_ptr, table_ptr, num_blocks, tokens, start, has_state, first, lane, form: tl.constexpr,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Returns the state's inputs of tokens [N, 1] before `start`, channels first + lane [1, C]."""
    is_lane = first + lane < form.columns
    is_kept = tokens < start
    # The state's last input is that of the token before the first.
    row = tokens - start + WIDTH - 1
    at = conv_offset(row, is_kept, first, lane, is_lane, table_ptr, num_blocks, form, WHOLE)
    mask = is_kept & is_lane & has_state
    return tl.load(memory_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sum_of_kept(
    memory_ptr, weight_ptr, table_ptr, num_blocks, tokens, start, has_state, first, lane,
    form: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Returns the share of the state's inputs in the convolution of tokens [N, 1], [N, C]."""
    is_lane = first + lane < form.columns
    total = tl.zeros((tokens.shape[0], lane.shape[1]), tl.float32)
    for tap in tl.static_range(WIDTH):
        weight_ptrs = weight_ptr + (first + lane) * WIDTH + tap
        weight = tl.load(weight_ptrs, mask=is_lane, other=0.0).to(tl.float32)
        total += weight * _load_kept(
            memory_ptr, table_ptr, num_blocks, tokens - (WIDTH - 1 - tap), start, has_state, first,
            lane, form, WIDTH, WHOLE,
        )  # fmt: skip
    return total


@triton.jit
def _keep_inputs(
    x_ptr, memory_ptr, read_ptr, table_ptr, x_stride, num_blocks, end, start, has_state, first,
    lane, form: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores the last inputs up to the token before `end`, for channels first + lane [1, C].

    read_ptr, table_ptr: pages of the state before the step, and of that after the token.
    """
    row = tl.arange(0, ROWS)[:, None]
    is_row = row < WIDTH - 1
    is_lane = first + lane < form.columns
    # Rows past the last have tokens from `end` on.
    tokens = end - WIDTH + 1 + row
    inputs = _load_new(x_ptr, x_stride, tokens, end, start, first, lane, form)
    inputs += _load_kept(
        memory_ptr, read_ptr, num_blocks, tokens, start, has_state, first, lane, form, WIDTH, WHOLE
    )
    at = conv_offset(row, is_row, first, lane, is_lane, table_ptr, num_blocks, form, WHOLE)
    # Threads write rows that others read.
    tl.debug_barrier()
    tl.store(memory_ptr + at, inputs.to(memory_ptr.dtype.element_ty), mask=is_row & is_lane)


@triton.jit(do_not_specialize=_VARYING)
def _causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, output_ptr, memory_ptr, block_tables_ptr, seq_lens_ptr,
    query_start_ptr, x_stride, table_stride, num_blocks, num_requests,
    form: tl.constexpr, WIDTH: tl.constexpr, ACTIVATES: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, SEARCHES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does CHANNELS channels of TOKENS tokens of a request, by default its first ones.

    SEARCHES: the tile may be a later one. The program with the first tile also keeps the last
    inputs, as it is the only one that reads the inputs kept before.
    """
    let_next_start(DEPENDENT)
    first = tl.program_id(0) * CHANNELS
    lane = tl.arange(0, CHANNELS)[None, :]
    is_lane = first + lane < form.columns
    weight_ptrs = weight_ptr + (first + lane) * WIDTH
    # Tables and kept inputs are of before this pass, so they need no wait.
    tile = tl.program_id(1)
    request = tile
    if SEARCHES:
        request = request_of_tile(tile, query_start_ptr, num_requests, TOKENS)
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    start, end, has_state, keeps = request_span(request, query_start_ptr, seq_lens_ptr, table_ptr)
    first_token = start
    if SEARCHES:
        first_token = start + (tile - start // TOKENS - request) * TOKENS
    position = first_position(request, seq_lens_ptr, start, end)
    read_ptr = slot_ptr(table_ptr, position, table_stride, form)
    tokens = first_token + tl.arange(0, TOKENS)[:, None]
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if (first_token == start) & (first_token < end):
        total += _sum_of_kept(
            memory_ptr, weight_ptr, read_ptr, num_blocks, tokens, start, has_state, first, lane,
            form, WIDTH, WHOLE,
        )  # fmt: skip
    wait_for_previous(DEPENDENT)
    if first_token < end:
        for tap in tl.static_range(WIDTH):
            weight = tl.load(weight_ptrs + tap, mask=is_lane, other=0.0).to(tl.float32)
            total += weight * _load_new(
                x_ptr, x_stride, tokens - (WIDTH - 1 - tap), end, start, first, lane, form
            )
        if bias_ptr is not None:
            total += tl.load(bias_ptr + first + lane, mask=is_lane, other=0.0).to(tl.float32)
        if ACTIVATES:
            total = total / (1.0 + tl.exp(-total))
        out_ptrs = output_ptr + tokens.to(tl.int64) * form.columns + first + lane
        mask = (tokens < end) & is_lane
        tl.store(out_ptrs, total.to(output_ptr.dtype.element_ty), mask=mask)
        if keeps & (first_token == start):
            for kept in range(first_kept(end - start, form) + 1, end - start + 1):
                slot = slot_ptr(table_ptr, position + kept, table_stride, form)
                _keep_inputs(
                    x_ptr, memory_ptr, read_ptr, slot, x_stride, num_blocks, start + kept, start,
                    has_state, first, lane, form, WIDTH, WHOLE, ROWS,
                )  # fmt: skip


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    *,
    activates: bool,
) -> None:
    """Convolves each channel with its last K inputs, and keeps the last K - 1 of each request.

    Launches may be captured. T tokens, C channels, R requests.

    Args:
        x: [T, C]; rows may be apart. Not the memory of `output`.
        weight: [C, K], contiguous, the newest input's last.
        bias: [C].
        output: [T, C], contiguous, of x's dtype. Tokens of no request keep their content.
        cache: the inputs kept, of each request that has computed tokens; those of requests without
            query tokens stay.
        metadata: of the step; block_tables name the pages of states.
        activates: applies silu.
    """
    num_tokens, channels = x.shape
    width = weight.shape[1]
    assert x.stride(1) == 1, "the channels of a token are contiguous"
    num_requests = len(metadata.seq_lens)
    tokens = tokens_of_a_program(metadata.max_seqlen_q)
    searches = metadata.max_seqlen_q > MOST_FEW
    launch = _launcher(conv_form(cache), width, activates, tokens, searches, x.device)
    num_tiles = num_tokens // tokens + num_requests if searches else num_requests
    tables = metadata.block_tables
    launch(
        (-(-channels // _CHANNELS), num_tiles, 1),
        x, weight, bias, output, cache.memory.view(cache.spec.conv_dtype), tables,
        metadata.seq_lens, metadata.query_start_loc, x.stride(0), tables.stride(0),
        cache.num_blocks, num_requests,
    )  # fmt: skip


@lru_cache
def _launcher(
    form: StateForm,
    width: int,
    activates: bool,
    tokens: int,
    searches: bool,
    device: torch.device,
) -> Launch:
    return Launch(
        _causal_conv_kernel, form=form, WIDTH=width, ACTIVATES=activates, TOKENS=tokens,
        CHANNELS=_CHANNELS, ROWS=triton.next_power_of_2(width - 1),
        WHOLE=form.columns % _CHANNELS == form.per_unit % _CHANNELS == 0, SEARCHES=searches,
        num_warps=min(4, tokens), **launch_options(device),
    )  # fmt: skip
