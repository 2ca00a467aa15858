"""Attention whose rows do not depend on the rest of the step, in parts of the keys.

The keys of a sequence are cut in parts of PART keys by position. Each part has a softmax of its
own, and a query merges the parts in the order of their positions. Which program computes a part
changes no bit: one program does all parts of a tile of queries or, for few queries after many keys,
one program does each part and the last to finish merges them.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kernels.attention.cache.cache_tensors import cache_tensors
from models.kernels.attention.chunk_start import chunk_start
from models.kernels.attention.configurations import LANES, PART
from models.kernels.attention.key_parts import Parts
from models.kernels.attention.online_softmax import add_lanes, attend_keys, whole_power
from models.kernels.attention.request_search import request_of_tile
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.tuning.tiles import AttentionTiles
from models.kv_cache import KVCacheData
from models.operands.base_two import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)
_LANES = tl.constexpr(LANES)
_PART = tl.constexpr(PART)
_MOST_SPLITS = 64
"""Most programs that share the parts of a sequence."""
_MOST_SPLIT_QUERIES = 8
"""Most queries of a request whose keys are shared."""
_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "most_parts", "split_queries", "most_partials",
]  # fmt: skip  # specialising on these would compile again while serving


class InvariantForm(NamedTuple):
    """All that a build of the kernel is made for.

    num_kv_heads to has_scales: as in DecodeForm.
    queries: tokens of a tile.
    padded_group, block_d: powers of two that hold a group and a head.
    keys, stages, is_exact: of AttentionTiles.
    is_single: every request has one token.
    is_short: the tiles are those of requests of up to `queries` tokens; others are skipped.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int
    soft_cap: float
    has_sinks: bool
    has_scales: bool
    queries: int
    padded_group: int
    block_d: int
    keys: int
    stages: int
    is_exact: bool
    is_single: bool
    is_short: bool


@triton.jit
def _attend_part(
    q, first, end, diagonal, positions, table_ptr, cache, kv_head, dims, scale_log2,
    form: tl.constexpr,
):  # fmt: skip
    """Returns weighted values, highest score and sum of exponentials of the keys [first, end).

    All queries of the tile see the keys before `diagonal`. These have a loop without masks; for few
    rows its code costs more registers than it saves work.
    """
    acc = tl.full([q.shape[0], form.block_d], 0.0, tl.float32)
    # Finite, as a query may see no key of the part and inf - inf is NaN.
    highest = tl.full([q.shape[0]], -1e30, tl.float32)
    if form.is_exact:
        total = tl.zeros([q.shape[0], _LANES], tl.float32)
    else:
        total = tl.zeros([q.shape[0]], tl.float32)
    diagonal = tl.minimum(tl.maximum(diagonal, first), end)
    if form.window == 0 and q.shape[0] > 16:
        acc, highest, total = attend_keys(
            q, acc, highest, total, first, diagonal, positions, table_ptr, cache, kv_head, dims,
            scale_log2, False, 0, form, form.is_exact,
        )  # fmt: skip
        first = diagonal
    acc, highest, total = attend_keys(
        q, acc, highest, total, first, end, positions, table_ptr, cache, kv_head, dims, scale_log2,
        True, form.window, form, form.is_exact,
    )  # fmt: skip
    if form.is_exact:
        total = add_lanes(total)
    return acc, highest, total


@triton.jit
def _before_keys(sinks_ptr, head, DTYPE: tl.constexpr, form: tl.constexpr):
    """Returns the highest score and the total of rows before they see any key."""
    highest = tl.full(head.shape, -1e30, tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    if form.has_sinks:
        # Scores without keys count as if seen first.
        sinks = tl.load(sinks_ptr + head, mask=head < form.group, other=0.0).to(tl.float32)
        highest = sinks * _LOG2_E
        total = tl.full(head.shape, 1.0, tl.float32)
        if form.is_exact:
            highest = whole_power(highest, DTYPE)
            total = tl.exp2(tl.fma(sinks, _LOG2_E, -highest))
    return highest, total


@triton.jit
def merge(acc, highest, total, part_acc, part_highest, part_total):
    """Folds one part into those before it; fma leaves the compiler no choice of rounding."""
    new_highest = tl.maximum(highest, part_highest)
    kept, weight = tl.exp2(highest - new_highest), tl.exp2(part_highest - new_highest)
    total = tl.fma(total, kept, part_total * weight)
    kept = tl.broadcast_to(kept[:, None], acc.shape)
    acc = tl.fma(acc, kept, part_acc * weight[:, None])
    return acc, new_highest, total


@triton.jit
def _store(output_ptrs, acc, total, in_tile):
    # A dummy request has no keys; its output is zero.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(output_ptrs, acc.to(output_ptrs.dtype.element_ty), mask=in_tile)


@triton.jit
def _queries_of(tile, query_start_ptr, num_requests, form: tl.constexpr):
    """Returns a tile's request, its first token, number of tokens and first one in the tile."""
    if form.is_single:
        # With few keys for each request, the search would take as long as their attention.
        return tile, tile, 1, 0
    request = tile
    if not form.is_short:
        request = request_of_tile(tile, query_start_ptr, num_requests, form.queries)
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    if form.is_short:
        return request, query_start, num_queries * (num_queries <= form.queries), 0
    first_query = (tile - query_start // form.queries - request) * form.queries
    return request, query_start, num_queries, first_query


@triton.jit(do_not_specialize=_VARYING)
def _invariant_kernel(  # noqa: PLR0915  # one launch, for the parts of all queries and their merge
    q_ptr, cache, output_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr, sinks_ptr, parts,
    table_stride, num_requests, most_parts, split_queries, most_partials, scale_log2,
    form: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attends neighbouring tokens, the heads of one kv head each, to their prefixes.

    parts.lse: highest scores of the partial results, and from most_partials on their totals.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    kv_head = tl.program_id(0)
    # The last tiles of a chunk have the most keys; they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.program_id(2)
    request, query_start, num_queries, first_query = _queries_of(
        tile, query_start_ptr, num_requests, form
    )
    num_cached = tl.load(seq_lens_ptr + request) - num_queries
    if first_query >= num_queries:
        return
    end = num_cached + tl.minimum(first_query + form.queries, num_queries)
    # Every query sees the keys up to the first one's position; whole tiles of them need no mask.
    diagonal = (num_cached + first_query + 1) // form.keys * form.keys
    first_key = 0
    if form.window > 0:
        first_key = num_cached + first_query + 1 - form.window
        first_key = tl.maximum(first_key, 0) // form.keys * form.keys
    elif form.window < 0:
        first_key = chunk_start(num_cached + first_query, form.window) // form.keys * form.keys
    first_part = first_key // _PART
    num_parts = tl.cdiv(end, _PART) - first_part
    is_split = (num_queries <= split_queries) & (num_parts > 1) & (num_parts <= most_parts)
    num_workers = tl.where(is_split, tl.minimum(num_parts, tl.num_programs(2)), 1)
    if split >= num_workers:
        return

    rows = tl.arange(0, form.queries * form.padded_group)
    dims = tl.arange(0, form.block_d)
    queries = first_query + rows // form.padded_group
    head = rows % form.padded_group
    in_rows = (queries < num_queries) & (head < form.group)
    in_tile = in_rows[:, None] & (dims < form.head_dim)[None, :]
    token = (query_start + queries).to(tl.int64)
    at_heads = ((token * form.num_kv_heads + kv_head) * form.group + head)[:, None] * form.head_dim
    at_heads += dims[None, :]
    q = tl.load(q_ptr + at_heads, mask=in_tile, other=0.0)
    positions = num_cached + queries
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    acc = tl.full([form.queries * form.padded_group, form.block_d], 0.0, tl.float32)
    highest, total = _before_keys(sinks_ptr + kv_head * form.group, head, q.dtype, form)
    # Rows of a request's partial results: its queries' heads, for each part.
    pair = (request * form.num_kv_heads + kv_head).to(tl.int64)
    at_sums = (pair * most_parts * split_queries + queries) * form.group + head
    part_size = split_queries * form.group
    # As a loop, so that there is one piece of code for the parts of all programs.
    for part in range(first_part + split, first_part + num_parts, num_workers):
        part_acc, part_highest, part_total = _attend_part(
            q, tl.maximum(part * _PART, first_key), tl.minimum((part + 1) * _PART, end), diagonal,
            positions, table_ptr, cache, kv_head, dims, scale_log2, form,
        )  # fmt: skip
        if is_split:
            at = at_sums + (part - first_part) * part_size
            at_partial = parts.partials + at[:, None] * form.head_dim + dims[None, :]
            tl.store(at_partial, part_acc, mask=in_tile)
            tl.store(parts.lse + at, part_highest, mask=in_rows)
            tl.store(parts.lse + most_partials + at, part_total, mask=in_rows)
        else:
            acc, highest, total = merge(acc, highest, total, part_acc, part_highest, part_total)
    at_output = output_ptr + at_heads
    if is_split:
        # All threads' stores come before the arrival that shows them to the last program.
        tl.debug_barrier()
        num_arrived = tl.atomic_add(parts.counters + pair, 1, sem="acq_rel")
        if num_arrived == num_workers - 1:
            tl.store(parts.counters + pair, 0)
            for part in range(num_parts):
                at = at_sums + part * part_size
                at_partial = at[:, None] * form.head_dim + dims[None, :]
                # .cg bypasses the first-level cache, which may hold values of earlier launches.
                part_acc = tl.load(
                    parts.partials + at_partial, mask=in_tile, other=0.0, cache_modifier=".cg"
                )
                part_highest = tl.load(
                    parts.lse + at, mask=in_rows, other=-1e30, cache_modifier=".cg"
                )
                part_total = tl.load(
                    parts.lse + most_partials + at, mask=in_rows, other=0.0, cache_modifier=".cg"
                )
                acc, highest, total = merge(acc, highest, total, part_acc, part_highest, part_total)
            _store(at_output, acc, total, in_tile)
    else:
        _store(at_output, acc, total, in_tile)


def tile_queries(tiles: AttentionTiles, group: int) -> int:
    """Returns the tokens of a tile of queries, each with the heads of one kv head."""
    return max(1, tiles.rows // int(triton.next_power_of_2(group)))


def attend_parts(
    q: torch.Tensor,
    output: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    tiles: AttentionTiles,
    *,
    skips_longer: bool,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> None:
    """Attends each query to its sequence's cached keys up to its own.

    The grid depends on T, R, Hk, the longest chunk and the workspace only and the host reads
    nothing, so a launch may be captured. T tokens, R requests, Hq/Hk query/kv heads, D head dim.

    q, output: [T, Hq, D], contiguous, possibly the same.
    skips_longer: skips requests of more tokens than tile_queries.
    Other arguments are as in prefill_attention.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_requests = cache.k.shape[2], metadata.seq_lens.shape[0]
    workspace, longest = metadata.workspace, metadata.max_seqlen_q
    queries = tile_queries(tiles, num_heads // num_kv_heads)
    is_single = longest == 1 and num_tokens == num_requests
    is_short = not is_single and (skips_longer or longest <= queries)
    launch = _launcher(
        num_heads, num_kv_heads, head_dim, cache.k.shape[1], tiles, sliding_window or 0,
        sinks is not None, cache.k_scale is not None, soft_cap, is_single, is_short, q.device,
    )  # fmt: skip
    num_tiles = num_requests
    if not (is_single or is_short):
        num_tiles += num_tokens // queries
    # Beside longer chunks only single tokens are shared.
    split_queries = longest if longest <= _MOST_SPLIT_QUERIES else 1
    split_queries = min(split_queries, queries)
    most_parts, most_partials = 1, 0
    # Without splits the kernel touches none of these three.
    parts = Parts(output, output, metadata.seq_lens)
    if workspace is not None:
        parts = Parts(workspace.partials, workspace.lse, workspace.counters)
        most_partials = parts.lse.numel() // 2
        room = parts.partials.numel() // (num_requests * num_heads * split_queries * head_dim)
        room = min(room, most_partials // (num_requests * num_heads * split_queries))
        if num_requests * num_kv_heads <= parts.counters.numel():
            most_parts = max(1, room)
    launch(
        (num_kv_heads, num_tiles, min(_MOST_SPLITS, most_parts)),
        q, cache_tensors(cache), output, metadata.block_tables, metadata.seq_lens,
        metadata.query_start_loc, q if sinks is None else sinks, parts,
        metadata.block_tables.stride(0), num_requests, most_parts, split_queries, most_partials,
        scale * LOG2_E,
    )  # fmt: skip


@lru_cache
def _launcher(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tiles: AttentionTiles,
    window: int,
    has_sinks: bool,
    has_scales: bool,
    soft_cap: float,
    is_single: bool,
    is_short: bool,
    device: torch.device,
) -> Launch:
    group = num_heads // num_kv_heads
    form = InvariantForm(
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size,
        window=window, soft_cap=soft_cap, has_sinks=has_sinks, has_scales=has_scales,
        queries=tile_queries(tiles, group), padded_group=triton.next_power_of_2(group),
        block_d=max(16, triton.next_power_of_2(head_dim)), keys=tiles.keys, stages=tiles.num_stages,
        is_exact=tiles.is_exact, is_single=is_single, is_short=is_short,
    )  # fmt: skip
    return Launch(
        _invariant_kernel, form=form, num_warps=tiles.num_warps, maxnreg=tiles.registers,
        **launch_options(device),
    )  # fmt: skip
