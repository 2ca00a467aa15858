"""Attention whose rows do not depend on the rest of the step, in parts of the keys.

The keys of a sequence are cut in parts of PART keys by position. Each part has a softmax of its
own, and a query merges the parts in the order of their positions. Which program computes a part
changes no bit: one program does all parts of a tile of queries or, for few queries after many keys,
one program does each part and the last to finish merges them.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kv_cache import KVCacheData
from models.ops.operands.base_two import LOG2_E
from models.ops.triton.attention.cache.cache_scales import cache_scales
from models.ops.triton.attention.configurations import Tiles
from models.ops.triton.attention.invariant.invariant_configurations import LANES, PART
from models.ops.triton.attention.online_softmax import add_lanes, attend_keys, whole_power
from models.ops.triton.attention.request_search import request_of_tile
from models.ops.triton.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.ops.triton.launching.launch import Launch

_LOG2_E = tl.constexpr(LOG2_E)
_LANES = tl.constexpr(LANES)
_MOST_SPLITS = 64
"""Most programs that share the parts of a sequence."""
_MOST_SPLIT_QUERIES = 8
"""Most queries of a request whose keys are shared."""
_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "most_parts", "split_queries", "most_partials",
]  # fmt: skip  # specialising on these would compile again while serving


@triton.jit
def _attend_part(
    q, first, end, diagonal, positions, table_ptr, cache_ptrs, kv_head, dims, scale_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr, SOFT_CAP: tl.constexpr, IS_EXACT: tl.constexpr,
    HAS_UNMASKED: tl.constexpr,
):  # fmt: skip
    """Returns weighted values, highest score and sum of exponentials of the keys [first, end).

    All queries of the tile see the keys before `diagonal`. HAS_UNMASKED: these have a loop without
    masks; for few rows its code costs more registers than it saves work.
    """
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = cache_ptrs
    acc = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    # Finite, as a query may see no key of the part and inf - inf is NaN.
    highest = tl.full([q.shape[0]], -1e30, tl.float32)
    if IS_EXACT:
        total = tl.zeros([q.shape[0], _LANES], tl.float32)
    else:
        total = tl.zeros([q.shape[0]], tl.float32)
    diagonal = tl.minimum(tl.maximum(diagonal, first), end)
    if WINDOW == 0 and HAS_UNMASKED:
        acc, highest, total = attend_keys(
            q, acc, highest, total, first, diagonal, positions, table_ptr, k_ptr, v_ptr,
            k_scale_ptr, v_scale_ptr, kv_head, dims, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, False, STAGES, 0, HAS_SCALES, SOFT_CAP,
            IS_EXACT,
        )  # fmt: skip
        first = diagonal
    acc, highest, total = attend_keys(
        q, acc, highest, total, first, end, positions, table_ptr, k_ptr, v_ptr,
        k_scale_ptr, v_scale_ptr, kv_head, dims, scale_log2,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, True, STAGES, WINDOW, HAS_SCALES, SOFT_CAP,
        IS_EXACT,
    )  # fmt: skip
    if IS_EXACT:
        total = add_lanes(total)
    return acc, highest, total


@triton.jit
def _before_keys(
    sinks_ptr, head, GROUP: tl.constexpr, HAS_SINKS: tl.constexpr, DTYPE: tl.constexpr,
    IS_EXACT: tl.constexpr,
):  # fmt: skip
    """Returns the highest score and the total of rows before they see any key."""
    highest = tl.full(head.shape, -1e30, tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    if HAS_SINKS:
        # Scores without keys count as if seen first.
        sinks = tl.load(sinks_ptr + head, mask=head < GROUP, other=0.0).to(tl.float32)
        highest = sinks * _LOG2_E
        total = tl.full(head.shape, 1.0, tl.float32)
        if IS_EXACT:
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
def _queries_of(
    tile, query_start_ptr, num_requests, QUERIES: tl.constexpr, IS_SINGLE: tl.constexpr,
    IS_SHORT: tl.constexpr,
):  # fmt: skip
    """Returns a tile's request, its first token, number of tokens and first one in the tile."""
    if IS_SINGLE:
        # With few keys for each request, the search would take as long as their attention.
        return tile, tile, 1, 0
    request = tile
    if not IS_SHORT:
        request = request_of_tile(tile, query_start_ptr, num_requests, QUERIES)
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    if IS_SHORT:
        return request, query_start, num_queries * (num_queries <= QUERIES), 0
    return request, query_start, num_queries, (tile - query_start // QUERIES - request) * QUERIES


@triton.jit(do_not_specialize=_VARYING)
def _invariant_kernel(  # noqa: PLR0915  # one launch, for the parts of all queries and their merge
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, output_ptr, block_tables_ptr, seq_lens_ptr,
    query_start_ptr, sinks_ptr, partials_ptr, sums_ptr, counters_ptr,
    table_stride, num_requests, most_parts, split_queries, most_partials, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, PADDED_GROUP: tl.constexpr,
    PART: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr, SOFT_CAP: tl.constexpr, IS_SINGLE: tl.constexpr,
    IS_SHORT: tl.constexpr, IS_EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attends QUERIES neighbouring tokens, the heads of one kv head each, to their prefixes.

    IS_SINGLE: every request has one token. IS_SHORT: the tiles are those of requests of up to
        QUERIES tokens; others are skipped.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    kv_head = tl.program_id(0)
    # The last tiles of a chunk have the most keys; they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.program_id(2)
    request, query_start, num_queries, first_query = _queries_of(
        tile, query_start_ptr, num_requests, QUERIES, IS_SINGLE, IS_SHORT
    )
    num_cached = tl.load(seq_lens_ptr + request) - num_queries
    if first_query >= num_queries:
        return
    end = num_cached + tl.minimum(first_query + QUERIES, num_queries)
    # Every query sees the keys up to the first one's position; whole tiles of them need no mask.
    diagonal = (num_cached + first_query + 1) // KEYS * KEYS
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(num_cached + first_query + 1 - WINDOW, 0) // KEYS * KEYS
    first_part = first_key // PART
    num_parts = tl.cdiv(end, PART) - first_part
    is_split = (num_queries <= split_queries) & (num_parts > 1) & (num_parts <= most_parts)
    num_workers = tl.where(is_split, tl.minimum(num_parts, tl.num_programs(2)), 1)
    if split >= num_workers:
        return

    rows = tl.arange(0, QUERIES * PADDED_GROUP)
    dims = tl.arange(0, BLOCK_D)
    queries = first_query + rows // PADDED_GROUP
    head = rows % PADDED_GROUP
    in_rows = (queries < num_queries) & (head < GROUP)
    in_tile = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    token = (query_start + queries).to(tl.int64)
    at_heads = ((token * NUM_KV_HEADS + kv_head) * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + at_heads, mask=in_tile, other=0.0)
    positions = num_cached + queries
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    cache_ptrs = (k_ptr, v_ptr, k_scale_ptr, v_scale_ptr)
    acc = tl.zeros([QUERIES * PADDED_GROUP, BLOCK_D], tl.float32)
    highest, total = _before_keys(
        sinks_ptr + kv_head * GROUP, head, GROUP, HAS_SINKS, q.dtype, IS_EXACT
    )
    # Rows of a request's partial results: its queries' heads, for each part.
    pair = (request * NUM_KV_HEADS + kv_head).to(tl.int64)
    at_sums = (pair * most_parts * split_queries + queries) * GROUP + head
    part_size = split_queries * GROUP
    # As a loop, so that there is one piece of code for the parts of all programs.
    for part in range(first_part + split, first_part + num_parts, num_workers):
        part_acc, part_highest, part_total = _attend_part(
            q, tl.maximum(part * PART, first_key), tl.minimum((part + 1) * PART, end), diagonal,
            positions, table_ptr, cache_ptrs, kv_head, dims, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, BLOCK_D, STAGES, WINDOW, HAS_SCALES, SOFT_CAP,
            IS_EXACT, QUERIES * PADDED_GROUP > 16,
        )  # fmt: skip
        if is_split:
            at = at_sums + (part - first_part) * part_size
            tl.store(partials_ptr + at[:, None] * HEAD_DIM + dims[None, :], part_acc, mask=in_tile)
            tl.store(sums_ptr + at, part_highest, mask=in_rows)
            tl.store(sums_ptr + most_partials + at, part_total, mask=in_rows)
        else:
            acc, highest, total = merge(acc, highest, total, part_acc, part_highest, part_total)
    at_output = output_ptr + at_heads
    if is_split:
        # All threads' stores come before the arrival that shows them to the last program.
        tl.debug_barrier()
        num_arrived = tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel")
        if num_arrived == num_workers - 1:
            tl.store(counters_ptr + pair, 0)
            for part in range(num_parts):
                at = at_sums + part * part_size
                at_partial = at[:, None] * HEAD_DIM + dims[None, :]
                # .cg bypasses the first-level cache, which may hold values of earlier launches.
                part_acc = tl.load(
                    partials_ptr + at_partial, mask=in_tile, other=0.0, cache_modifier=".cg"
                )
                part_highest = tl.load(
                    sums_ptr + at, mask=in_rows, other=-1e30, cache_modifier=".cg"
                )
                part_total = tl.load(
                    sums_ptr + most_partials + at, mask=in_rows, other=0.0, cache_modifier=".cg"
                )
                acc, highest, total = merge(acc, highest, total, part_acc, part_highest, part_total)
            _store(at_output, acc, total, in_tile)
    else:
        _store(at_output, acc, total, in_tile)


def tile_queries(tiles: Tiles, group: int) -> int:
    """Returns the tokens of a tile of queries, each with the heads of one kv head."""
    return max(1, tiles.rows // int(triton.next_power_of_2(group)))


def attend_parts(
    q: torch.Tensor,
    output: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    tiles: Tiles,
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
    partials, sums, counters = output, output, metadata.seq_lens
    if workspace is not None:
        partials, sums, counters = workspace.partials, workspace.lse, workspace.counters
        most_partials = sums.numel() // 2
        room = partials.numel() // (num_requests * num_heads * split_queries * head_dim)
        room = min(room, most_partials // (num_requests * num_heads * split_queries))
        if num_requests * num_kv_heads <= counters.numel():
            most_parts = max(1, room)
    launch(
        (num_kv_heads, num_tiles, min(_MOST_SPLITS, most_parts)),
        q, cache.k, cache.v, *cache_scales(cache), output, metadata.block_tables,
        metadata.seq_lens, metadata.query_start_loc, q if sinks is None else sinks,
        partials, sums, counters, metadata.block_tables.stride(0), num_requests, most_parts,
        split_queries, most_partials, scale * LOG2_E,
    )  # fmt: skip


@lru_cache
def _launcher(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tiles: Tiles,
    window: int,
    has_sinks: bool,
    has_scales: bool,
    soft_cap: float,
    is_single: bool,
    is_short: bool,
    device: torch.device,
) -> Launch:
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    return Launch(
        _invariant_kernel, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, QUERIES=tile_queries(tiles, group), PADDED_GROUP=padded_group,
        PART=PART, KEYS=tiles.keys, IS_EXACT=tiles.is_exact,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), STAGES=tiles.num_stages, WINDOW=window,
        HAS_SINKS=has_sinks, HAS_SCALES=has_scales, SOFT_CAP=soft_cap, IS_SINGLE=is_single,
        IS_SHORT=is_short, num_warps=tiles.num_warps, maxnreg=tiles.registers,
        **launch_options(device),
    )  # fmt: skip
