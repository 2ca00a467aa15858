"""Paged causal attention of few queries of each request, to keys and values of 8 bits.

Keys are read once, as they are, for up to some hundred rows of queries: drafts to verify, short
messages after a long context, last chunks of prompts.

All programs get equally many tiles of keys, wherever sequences begin and end, so a program may have
the last part of one sequence, some whole ones and the first part of another. Parts of a sequence
are added up by tile_parts.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata, AttentionWorkspace
from models.kernels.attention.cache.cache_tensors import cache_tensors
from models.kernels.attention.chunk_start import chunk_start
from models.kernels.attention.configurations import few_query_tiles
from models.kernels.attention.decode.position_loops import (
    attend_with_keys_as_rows,
    attend_with_queries_as_rows,
)
from models.kernels.attention.online_softmax import see_nothing, see_sinks
from models.kernels.attention.prefill.tile_parts import (
    NUM_PLANNED,
    add_parts,
    deal_tiles,
    parts_of,
    write_part,
)
from models.kernels.attention.store_heads import store_heads
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.tuning.tiles import AttentionTiles
from models.kv_cache import KVCacheData
from models.operands.base_two import LOG2_E

_MOST_QUERIES = 64
_ROWS_OF_TILE = 64
_MOST_ROWS = 2 * _ROWS_OF_TILE
"""Query tokens of a request, and these times the heads of a group, up to which this is used.

Each tile of queries reads all keys. 20, 48 and 64 tokens of 4 heads after 16,000 took 62.6, 83 and
107 us, by way of copies 63.6, 75 and 76 (H200, 8 kv heads of 128, 2026-11).
"""

_SEEN_AT_ONCE = tl.constexpr(256)
"""Requests that a program reads together."""
_ALL_WORK = tl.constexpr(2**31 - 1)

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "min_queries", "most_queries", "output_scale_stride",
]  # fmt: skip  # specialising on these would compile again while serving


class FewForm(NamedTuple):
    """All that a build of the kernel is made for.

    num_kv_heads to has_sinks: as in DecodeForm.
    rows, queries: rows of a tile, and the tokens that have a row for each head of the group.
    keys, stages, keys_as_rows: of AttentionTiles.
    block_d: power of two that holds a head.
    least_tiles: fewest tiles of keys of a program that has any.
    has_assembly: a GPU runs the kernel, not Triton's interpreter.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int
    soft_cap: float
    has_sinks: bool
    rows: int
    queries: int
    keys: int
    stages: int
    keys_as_rows: bool
    block_d: int
    least_tiles: int
    has_assembly: bool


class Piece(NamedTuple):
    """A tile of queries, and the keys that a program attends them to.

    query_start, num_queries: of the request; first_query: of the tile, in the request.
    start, end: of the keys.
    rows_shift: of a token's number in its request, to the end of the keys that it sees.
    is_first: whether the tile's first key is one of them.
    at_partials: row of the results of all parts of the tile's keys.
    part, num_parts: which part of them these are, and how many there are.
    """

    query_start: Any
    num_queries: Any
    first_query: Any
    start: Any
    end: Any
    rows_shift: Any
    is_first: Any
    at_partials: Any
    part: Any
    num_parts: Any


@triton.jit
def _seen_tiles(seq_lens, num_queries, form: tl.constexpr):
    """Returns the first key that a request's queries see, and their tiles of keys, at least one."""
    first = tl.zeros_like(seq_lens)
    if form.window > 0:
        first = tl.maximum(seq_lens - num_queries + 1 - form.window, 0) // form.keys * form.keys
    elif form.window < 0:
        first = chunk_start(seq_lens - num_queries, form.window) // form.keys * form.keys
    return first, tl.maximum(tl.cdiv(seq_lens - first, form.keys), 1)


@triton.jit
def _request_of(
    work, seq_lens_ptr, query_start_ptr, num_requests, min_queries, most_queries,
    form: tl.constexpr,
):  # fmt: skip
    """Returns the request that has a tile of keys, by the tile's number, and its first tile.

    For _ALL_WORK the latter is the number of all tiles. Each tile of queries has tiles of keys of
    its own.
    """
    request = 0
    start = 0
    num_before = 0
    for first in range(0, num_requests, _SEEN_AT_ONCE):
        requests = first + tl.arange(0, _SEEN_AT_ONCE)
        is_request = requests < num_requests
        starts = tl.load(query_start_ptr + requests, mask=is_request, other=0)
        num_queries = tl.load(query_start_ptr + requests + 1, mask=is_request, other=0) - starts
        seq_lens = tl.load(seq_lens_ptr + requests, mask=is_request, other=0)
        _, num_tiles = _seen_tiles(seq_lens, num_queries, form)
        is_mine = (num_queries >= min_queries) & (num_queries <= most_queries)
        num_tiles *= tl.cdiv(num_queries, form.queries)
        counts = tl.where(is_request & is_mine, num_tiles, 0)
        ends = num_before + tl.cumsum(counts, 0)
        is_before = is_request & (ends <= work)
        request += tl.sum(is_before.to(tl.int32), 0)
        start = tl.maximum(start, tl.max(tl.where(is_before, ends, 0), 0))
        num_before += tl.sum(counts, 0)
    return request, start


@triton.jit
def _attend_piece(
    q_ptr, cache, output_ptr, output_scale_ptr, output_scale_stride, parts, table_ptr, sinks_ptr,
    line_ptr, piece, kv_head, scale_log2, form: tl.constexpr,
):  # fmt: skip
    """Attends a piece's queries, with the heads of one kv head, to its keys."""
    rows = tl.arange(0, form.rows)
    dims = tl.arange(0, form.block_d)
    head = rows % form.group
    queries = piece.first_query + rows // form.group
    in_rows = (queries < piece.num_queries) & (rows < form.queries * form.group)
    in_tile = in_rows[:, None] & (dims < form.head_dim)[None, :]
    token = (piece.query_start + queries).to(tl.int64)
    at_heads = ((token * form.num_kv_heads + kv_head) * form.group + head)[:, None] * form.head_dim
    at_heads += dims[None, :]
    q = tl.load(q_ptr + at_heads, mask=in_tile, other=0.0)
    highest, total = see_nothing(form.rows)
    if form.has_sinks and piece.is_first:
        highest, total = see_sinks(sinks_ptr + kv_head * form.group, head, in_rows)
    rows_end = queries + piece.rows_shift
    rows_start = rows_end - form.window
    if form.window < 0:
        rows_start = chunk_start(rows_end - 1, form.window)
    if form.keys_as_rows:
        acc, highest, total = attend_with_keys_as_rows(
            q, tl.minimum(rows_end, piece.end), rows_start, highest, total,
            piece.start, piece.end, table_ptr, cache, kv_head, dims, scale_log2, form,
        )  # fmt: skip
    else:
        acc, highest, total = attend_with_queries_as_rows(
            q, tl.minimum(rows_end, piece.end), rows_start, highest, total,
            piece.start, piece.end, table_ptr, cache, kv_head, dims, scale_log2, form,
        )  # fmt: skip
    # A dummy request has no keys; its output is zero. A row may see no key of a part.
    total = tl.where(total > 0.0, total, 1.0)
    acc *= (1.0 / total)[:, None]
    if piece.num_parts > 1:
        at_tokens = ((queries - piece.first_query) * piece.num_parts + piece.part) * form.group
        at_rows = piece.at_partials + at_tokens + head
        lse = highest + tl.log2(total)
        write_part(acc, lse, at_rows, dims, in_tile, in_rows, parts, form.head_dim)
        if piece.part == 0:
            _write_line(line_ptr, piece, kv_head, form)
    else:
        at_scales = (kv_head * form.group + head) * output_scale_stride + token
        store_heads(
            acc, output_ptr, output_scale_ptr, at_heads, at_scales, in_tile, in_rows,
            q_ptr.dtype.element_ty,
        )  # fmt: skip


@triton.jit
def _write_line(line_ptr, piece, kv_head, form: tl.constexpr):
    """Writes the line of the plan of a piece that has the first part of its tile's keys."""
    tl.store(line_ptr, piece.num_parts)
    tl.store(line_ptr + 1, piece.query_start + piece.first_query)
    tl.store(line_ptr + 2, tl.minimum(piece.num_queries - piece.first_query, form.queries))
    tl.store(line_ptr + 3, kv_head)


@triton.jit(do_not_specialize=_VARYING)
def _few_queries_kernel(
    q_ptr, cache, output_ptr, output_scale_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr,
    sinks_ptr, parts, table_stride, num_requests, min_queries, most_queries, output_scale_stride,
    scale_log2, form: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attends requests of min_queries to most_queries tokens, an equal share of keys a program.

    A piece is a tile of queries, with the heads of one kv head, and its keys. The results of one
    that is split are at twice the number of its first program, as a program has a part of two split
    pieces at most.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    # Programs of all heads read the same tokens at a time, which are side by side in memory.
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    num_programs = tl.num_programs(1)
    first_place = kv_head * num_programs
    line_ptr = parts.plan + (1 + first_place + program) * NUM_PLANNED
    tl.store(line_ptr, 0)
    tl.store(parts.plan, form.num_kv_heads * num_programs, mask=first_place + program == 0)
    _, num_tiles = _request_of(
        _ALL_WORK, seq_lens_ptr, query_start_ptr, num_requests, min_queries, most_queries, form
    )
    share = tl.maximum(tl.cdiv(num_tiles, num_programs), form.least_tiles)
    work = program * share
    last = tl.minimum(work + share, num_tiles)
    while work < last:
        request, request_start = _request_of(
            work, seq_lens_ptr, query_start_ptr, num_requests, min_queries, most_queries, form
        )
        query_start = tl.load(query_start_ptr + request)
        num_queries = tl.load(query_start_ptr + request + 1) - query_start
        seq_len = tl.load(seq_lens_ptr + request)
        first_key, piece_tiles = _seen_tiles(seq_len, num_queries, form)
        number = (work - request_start) // piece_tiles
        piece_start = request_start + number * piece_tiles
        piece_end = piece_start + piece_tiles
        owner = piece_start // share
        work_end = tl.minimum(piece_end, last)
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        piece = Piece(
            query_start, num_queries, number * form.queries,
            first_key + (work - piece_start) * form.keys,
            tl.minimum(first_key + (work_end - piece_start) * form.keys, seq_len),
            seq_len - num_queries + 1, work == piece_start,
            (first_place + owner) * (2 * form.rows), program - owner,
            (piece_end - 1) // share - owner + 1,
        )  # fmt: skip
        _attend_piece(
            q_ptr, cache, output_ptr, output_scale_ptr, output_scale_stride, parts, table_ptr,
            sinks_ptr, line_ptr, piece, kv_head, scale_log2, form,
        )  # fmt: skip
        work = work_end


def most_few_queries(
    q: torch.Tensor, cache: KVCacheData, workspace: AttentionWorkspace | None
) -> int:
    """Returns up to how many tokens of a request `attend_few_queries` may take; 0: none."""
    _, num_heads, head_dim = q.shape
    group = num_heads // cache.k.shape[2]
    if (
        cache.k_scale is None
        or workspace is None
        or q.dtype.itemsize != 2
        or head_dim % 4 > 0
        or not 32 < head_dim <= 128
        or group > _ROWS_OF_TILE
    ):
        return 0
    return min(_MOST_QUERIES, _MOST_ROWS // group)


def attend_few_queries(
    q: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    *,
    output_scale: torch.Tensor | None,
    min_queries: int,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> int:
    """Attends the queries of requests of few tokens to their sequences' keys, up to their own.

    The cache is one of 8 bits, and has the step's keys and values, too. Grids are constant and the
    host reads nothing, so launches may be captured. Arguments are as in prefill_attention.

    Returns:
        Up to how many tokens of a request were attended. 0: none, as the host does not know of such
        requests. Two launches without work take 5 us in a recorded step of prompts (H200, 2026-11).
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    group = num_heads // num_kv_heads
    most = most_few_queries(q, cache, metadata.workspace)
    if most == 0:
        return 0
    num_requests = metadata.seq_lens.shape[0]
    num_rows = min(metadata.max_seqlen_q, most) * group
    tiles = few_query_tiles(num_rows, group, num_requests, q.device)
    launch = _launcher(
        num_kv_heads, group, head_dim, cache.k.shape[1], tiles, sliding_window or 0,
        sinks is not None, soft_cap, q.device,
    )  # fmt: skip
    if not has_few(metadata, most):
        if launch.is_built:
            return 0
        most = 0  # for its build: which kernel computes a request depends on the step alone
    shared = deal_tiles(
        metadata, num_programs=tiles.num_programs, num_kv_heads=num_kv_heads, rows=tiles.rows,
        head_dim=head_dim,
    )  # fmt: skip
    launch(
        (num_kv_heads, shared.num_places // num_kv_heads, 1),
        q, cache_tensors(cache), output, output_scale, metadata.block_tables, metadata.seq_lens,
        metadata.query_start_loc, q if sinks is None else sinks, parts_of(shared),
        metadata.block_tables.stride(0), num_requests, min_queries, most,
        0 if output_scale is None else output_scale.stride(1), scale * LOG2_E,
    )  # fmt: skip
    add_parts(q, output, shared, output_scale=output_scale, num_kv_heads=num_kv_heads)
    return most


def has_few(metadata: AttentionMetadata, most_queries: int) -> bool:
    """Returns whether the host knows that a step has chunks of few tokens."""
    return metadata.max_seqlen_q <= most_queries or any(
        chunk.num_queries <= most_queries for chunk in metadata.chunks
    )


@lru_cache
def _launcher(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    tiles: AttentionTiles,
    window: int,
    has_sinks: bool,
    soft_cap: float,
    device: torch.device,
) -> Launch:
    form = FewForm(
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size,
        window=window, soft_cap=soft_cap, has_sinks=has_sinks, rows=tiles.rows,
        queries=tiles.rows // group, keys=tiles.keys, stages=tiles.num_stages,
        keys_as_rows=tiles.keys_as_rows, block_d=triton.next_power_of_2(head_dim),
        least_tiles=tiles.least_part // tiles.keys, has_assembly=device.type == "cuda",
    )  # fmt: skip
    return Launch(
        _few_queries_kernel, form=form, num_warps=tiles.num_warps, maxnreg=tiles.registers,
        **launch_options(device),
    )  # fmt: skip
