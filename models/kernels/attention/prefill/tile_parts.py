"""Adds up what programs that shared the keys of a tile of queries have computed.

Few tiles of queries after many keys would leave most multiprocessors without work. Their keys are
split into parts, whose results are in the workspace: those of all parts of a token and head follow
each other. A plan on the device has a line for each part.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata, AttentionWorkspace
from models.kernels.attention.chunk_start import chunk_start
from models.kernels.attention.configurations import ROWS_OF_TILE
from models.kernels.attention.key_parts import combine_parts
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.tuning.tiles import MAX_SPLITS

LEAST_PART = tl.constexpr(512)
"""Fewest keys of a part, at least two tiles of them: each query sees some key of the first part."""

NUM_PLANNED = tl.constexpr(4)
"""Integers of a line of the plan: parts of the tile in the line of its first part that has others,
else 0; first token; tokens; kv head. The first line has the number of the others."""

MOST_TOKENS = 256
"""Of a step whose tiles are shared. The code for it takes time in every piece of work: a prompt of
2048 tokens took 77 us with it instead of 71, 16 prompts of 512 took 158 instead of 134 (H100, 8 kv
heads of dimension 128, 2026-11)."""

ROWS_OF_PART = tl.constexpr(ROWS_OF_TILE)
"""Rows of results that a part has room for."""

_PROGRAMS_OF_TILE = 8
"""Programs that share a tile's tokens."""
_MOST_AT_ONCE = 16
_AT_ONCE = 8192
"""Most partial results that a program reads together, and their elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTiles:
    """Where programs that share tiles leave their results.

    partials, lse: of the workspace. plan: [1 + num_places, NUM_PLANNED] int32.
    num_places: most parts of shared tiles. rows: of results that a part has room for.
    num_shares: programs that share tiles, or, of split_tiles, that share each; 0: none does.
    """

    partials: torch.Tensor
    lse: torch.Tensor
    plan: torch.Tensor
    num_places: int
    rows: int
    num_shares: int


class TileParts(NamedTuple):
    """The tensors of SharedTiles; in a kernel these are pointers."""

    partials: Any
    lse: Any
    plan: Any


@triton.jit
def part_of_tile(
    request, first_query, is_mine, kv_head, tile, num_splits, requests, plan_ptr,
    form: tl.constexpr,
):  # fmt: skip
    """Returns the place of a tile's results, the part of the program, and the tile's parts.

    Writes the program's line of the plan, if programs share tiles. requests, form: Requests and
    PrefillForm of prefill_attention.
    """
    query_start = tl.load(requests.query_start + request)
    num_queries = tl.load(requests.query_start + request + 1) - query_start
    num_cached = tl.load(requests.seq_lens + request) - num_queries
    if form.window > 0:
        num_cached = tl.minimum(num_cached, form.window)
    elif form.window < 0:
        # A part must have keys that all of the tile's queries see.
        first = num_cached + first_query
        last = num_cached + tl.minimum(first_query + form.queries, num_queries) - 1
        start = chunk_start(first, form.window)
        is_whole = start == chunk_start(last, form.window)
        num_cached = tl.where(is_whole, tl.minimum(first - start, num_cached), 0)
    num_parts = tl.maximum(tl.minimum(num_cached // LEAST_PART, num_splits), 1)
    part = tl.program_id(2)
    place = (tile * form.num_kv_heads + kv_head) * num_splits
    line_ptr = plan_ptr + (1 + place + part) * NUM_PLANNED
    is_written = is_mine & (part == 0) & (num_parts > 1)
    is_shared = num_splits > 1
    tl.store(line_ptr, tl.where(is_written, num_parts, 0), mask=is_shared)
    tl.store(line_ptr + 1, query_start + first_query, mask=is_shared)
    tl.store(line_ptr + 2, tl.minimum(num_queries - first_query, form.queries), mask=is_shared)
    tl.store(line_ptr + 3, kv_head, mask=is_shared)
    num_places = tl.num_programs(0) * tl.num_programs(1) * num_splits
    tl.store(plan_ptr, num_places, mask=is_shared & (place + part == 0))
    return place, part, num_parts


@triton.jit
def first_masked(first_position, form: tl.constexpr):
    """Returns the first of a tile of keys that some query from first_position on may not see.

    Every query sees the keys up to the first one's position. With a window, any tile from the first
    query's first key on may need the mask of a query's.
    """
    first = first_position + 1
    if form.window > 0:
        first = tl.maximum(first - form.window, 0)
    elif form.window < 0:
        first = chunk_start(first_position, form.window)
    return first // form.keys * form.keys


@triton.jit
def keys_of_part(part, num_parts, diagonal, end, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Returns a part's first key, the first one that needs a mask, and the end of its keys.

    Each query sees the first keys of every part, as parts are much longer than a tile.
    """
    first = 0
    if WINDOW != 0:
        first = diagonal
    num_key_tiles = tl.cdiv(end - first, KEYS)
    start = first + part * num_key_tiles // num_parts * KEYS
    end = tl.minimum(first + (part + 1) * num_key_tiles // num_parts * KEYS, end)
    return start, tl.minimum(tl.maximum(start, diagonal), end), end


@triton.jit
def write_part(acc, lse, at_rows, dims, in_tile, in_rows, parts, HEAD_DIM: tl.constexpr):
    """Stores the results of some rows for one part of their keys."""
    tl.store(parts.partials + at_rows[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_tile)
    tl.store(parts.lse + at_rows, lse, mask=in_rows)


@triton.jit(do_not_specialize=["output_scale_stride"])
def _add_tile_parts_kernel(
    q_ptr, partials_ptr, lse_ptr, plan_ptr, output_ptr, output_scale_ptr, output_scale_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
    NUM_PLANNED: tl.constexpr, ROWS_OF_PART: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of some tokens of the tile whose first part has this program's line."""
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    place = tl.program_id(0)
    if place >= tl.load(plan_ptr):
        return
    line_ptr = plan_ptr + (1 + place) * NUM_PLANNED
    num_parts = tl.load(line_ptr)
    if num_parts == 0:
        return
    first_token = tl.load(line_ptr + 1)
    num_tokens = tl.load(line_ptr + 2)
    kv_head = tl.load(line_ptr + 3)
    for i in range(tl.program_id(1), num_tokens, tl.num_programs(1)):
        row = place * ROWS_OF_PART + i * num_parts * GROUP
        token = (first_token + i).to(tl.int64)
        combine_parts(
            partials_ptr + row * HEAD_DIM, lse_ptr + row,
            output_ptr + (token * NUM_KV_HEADS + kv_head) * GROUP * HEAD_DIM, output_scale_ptr,
            kv_head * GROUP * output_scale_stride + token, output_scale_stride, num_parts,
            GROUP, PADDED_GROUP, HEAD_DIM, BLOCK_D, AT_ONCE, q_ptr.dtype.element_ty,
        )  # fmt: skip


def share_tiles(
    metadata: AttentionMetadata,
    *,
    num_tokens: int,
    num_kv_heads: int,
    rows_of_token: int,
    num_programs: int,
    head_dim: int,
) -> SharedTiles | None:
    """Returns room for the results of parts of tiles; None without a workspace or with many tokens.

    The host reads nothing, and decides by what holds for each replay of a graph. Tiles of at least
    twice as many pieces as num_programs, which share tiles, are not shared.

    rows_of_token: rows of a tile that the query heads of a token and kv head take.
    """
    workspace = metadata.workspace
    if workspace is None or num_tokens > MOST_TOKENS:
        return None
    room = min(_room(workspace, ROWS_OF_TILE, head_dim), num_programs)
    least_pieces = num_tokens // (ROWS_OF_TILE // rows_of_token) * num_kv_heads
    is_shared = metadata.max_seqlen_k >= 2 * LEAST_PART.value and least_pieces < 2 * num_programs
    return SharedTiles(
        partials=workspace.partials,
        lse=workspace.lse,
        plan=workspace.counters.new_empty(1 + room, NUM_PLANNED.value),
        num_places=room,
        rows=ROWS_OF_TILE,
        num_shares=room if is_shared else 0,
    )


def split_tiles(
    metadata: AttentionMetadata, *, num_tokens: int, num_pieces: int, rows: int, head_dim: int
) -> SharedTiles | None:
    """Returns the same where each tile and kv head has as many programs.

    num_pieces: most tiles times kv heads. rows: of a tile.
    """
    workspace = metadata.workspace
    if workspace is None or num_tokens > MOST_TOKENS:
        return None
    num_shares = min(MAX_SPLITS, _room(workspace, rows, head_dim) // num_pieces)
    if metadata.max_seqlen_k < 2 * LEAST_PART.value or num_shares == 1:
        num_shares = 0
    # The counters are zero: there is no part.
    plan = workspace.counters
    if num_shares > 0:
        plan = plan.new_empty(1 + num_pieces * num_shares, NUM_PLANNED.value)
    return SharedTiles(
        partials=workspace.partials,
        lse=workspace.lse,
        plan=plan,
        num_places=num_pieces * num_shares,
        rows=rows,
        num_shares=num_shares,
    )


def deal_tiles(
    metadata: AttentionMetadata, *, num_programs: int, num_kv_heads: int, rows: int, head_dim: int
) -> SharedTiles:
    """Returns the same where each program has a part of up to two shared tiles, and a line.

    Each kv head has as many programs. metadata: with a workspace. rows: of a tile.
    """
    workspace = metadata.workspace
    assert workspace is not None, "the caller checked"
    most = min(num_programs, _room(workspace, 2 * rows, head_dim))
    num_places = max(1, most // num_kv_heads) * num_kv_heads
    return SharedTiles(
        partials=workspace.partials,
        lse=workspace.lse,
        plan=workspace.counters.new_empty(1 + num_places, NUM_PLANNED.value),
        num_places=num_places,
        rows=2 * rows,
        num_shares=num_places,
    )


def parts_of(shared: SharedTiles | None) -> TileParts | None:
    """Returns what kernels take of shared tiles, as one parameter."""
    return None if shared is None else TileParts(shared.partials, shared.lse, shared.plan)


def _room(workspace: AttentionWorkspace, rows: int, head_dim: int) -> int:
    """Returns for how many parts of tiles there is room."""
    return min(workspace.lse.numel(), workspace.partials.numel() // head_dim) // rows


def add_parts(
    q: torch.Tensor,
    output: torch.Tensor,
    shared: SharedTiles,
    *,
    output_scale: torch.Tensor | None,
    num_kv_heads: int,
) -> None:
    """Stores the sums of all shared tiles' parts in `output`.

    q, output, output_scale: as in prefill_attention; only the dtype of q matters.
    """
    _, num_heads, head_dim = q.shape
    launch = _launcher(num_heads // num_kv_heads, num_kv_heads, head_dim, shared.rows, q.device)
    if shared.num_shares == 0 and launch.is_built:
        return
    launch(
        (max(1, shared.num_places), _PROGRAMS_OF_TILE, 1),
        q, shared.partials, shared.lse, shared.plan, output, output_scale,
        0 if output_scale is None else output_scale.stride(1),
    )  # fmt: skip


@lru_cache
def _launcher(
    group: int, num_kv_heads: int, head_dim: int, rows: int, device: torch.device
) -> Launch:
    padded_group = triton.next_power_of_2(group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    return Launch(
        _add_tile_parts_kernel, NUM_KV_HEADS=num_kv_heads, GROUP=group, PADDED_GROUP=padded_group,
        HEAD_DIM=head_dim, BLOCK_D=block_d,
        AT_ONCE=max(1, min(_MOST_AT_ONCE, _AT_ONCE // (padded_group * block_d))),
        NUM_PLANNED=NUM_PLANNED.value, ROWS_OF_PART=rows, num_warps=4, **launch_options(device),
    )  # fmt: skip
