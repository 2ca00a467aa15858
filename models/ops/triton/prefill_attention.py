"""Paged causal attention of chunks of queries, of any lengths side by side."""

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata, KVCacheData
from models.ops.triton.cache_scales import cache_scales
from models.ops.triton.configurations import prefill_tiles
from models.ops.triton.online_softmax import attend_keys

_METADATA = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "min_queries",
]  # fmt: skip  # specialising on these would compile again while serving


@triton.jit
def _request_of(tile, query_start_ptr, num_requests, QUERIES: tl.constexpr):
    """Returns the request that a tile belongs to.

    Each request's tiles start at query_start // QUERIES + its number: enough for the worst case
    that every request ends in a tile of one query. So the map needs no work on the host.
    """
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=_METADATA)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, output_ptr, block_tables_ptr,
    seq_lens_ptr, query_start_ptr, sinks_ptr,
    table_stride, num_requests, min_queries, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, PADDED_GROUP: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Attends QUERIES neighbouring tokens, the heads of one kv head each, to their prefixes."""
    kv_head = tl.program_id(0)
    # The last tiles of a chunk have the most keys; they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request = _request_of(tile, query_start_ptr, num_requests, QUERIES)
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    first_query = (tile - query_start // QUERIES - request) * QUERIES
    if first_query >= num_queries or num_queries < min_queries:
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
    num_cached = tl.load(seq_lens_ptr + request) - num_queries
    positions = num_cached + queries
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    acc = tl.zeros([QUERIES * PADDED_GROUP, BLOCK_D], tl.float32)
    highest = tl.full([QUERIES * PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * PADDED_GROUP], tl.float32)
    if HAS_SINKS:
        # Scores without keys, as if they had been seen first.
        sinks = tl.load(sinks_ptr + kv_head * GROUP + head, mask=head < GROUP, other=0.0)
        highest = sinks.to(tl.float32) * 1.4426950408889634
        total = tl.full([QUERIES * PADDED_GROUP], 1.0, tl.float32)
    # Every query sees the keys up to the first one's position; whole tiles of them need no mask.
    diagonal = (num_cached + first_query + 1) // KEYS * KEYS
    end = num_cached + tl.minimum(first_query + QUERIES, num_queries)
    if WINDOW > 0:
        # From the first query's first key on, every tile may need the mask of somebody's window.
        diagonal = tl.maximum(num_cached + first_query + 1 - WINDOW, 0) // KEYS * KEYS
    else:
        acc, highest, total = attend_keys(
            q, acc, highest, total, 0, diagonal, positions, table_ptr, k_ptr, v_ptr, k_scale_ptr,
            v_scale_ptr, kv_head, dims, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, False, STAGES, 0, HAS_SCALES,
        )  # fmt: skip
    acc, highest, total = attend_keys(
        q, acc, highest, total, diagonal, end, positions, table_ptr, k_ptr, v_ptr, k_scale_ptr,
        v_scale_ptr, kv_head, dims, scale_log2,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, True, STAGES, WINDOW, HAS_SCALES,
    )  # fmt: skip
    # A dummy request has no keys; its output is zero.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(output_ptr + at_heads, acc.to(output_ptr.dtype.element_ty), mask=in_tile)


def prefill_attention(
    q: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    *,
    min_queries: int,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """Attends each query of longer chunks to its sequence's keys up to its own.

    T tokens, R requests, Hq/Hk query/kv heads, D head dim. The grid depends on T, R and Hk only,
    and nothing is read on the host, so that a launch may be captured and replayed.

    Args:
        q: [T, Hq, D], contiguous; may be `output`.
        cache: the layer's keys and values, this step's among them.
        metadata: the step's, on the GPU.
        output: [T, Hq, D], contiguous.
        min_queries: requests with fewer query tokens are left alone.
        sliding_window: how many keys a query sees at most.
        sinks: [Hq], scores without keys.

    Source: Dao 2023, "FlashAttention-2", section 3.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    num_requests = metadata.seq_lens.shape[0]
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    tiles = prefill_tiles(q.dtype, block_d)
    queries = max(1, tiles.rows // padded_group)
    scales = cache_scales(cache)
    _prefill_kernel[(num_kv_heads, num_tokens // queries + num_requests)](
        q, cache.k, cache.v, *scales, output, metadata.block_tables, metadata.seq_lens,
        metadata.query_start_loc, q if sinks is None else sinks, metadata.block_tables.stride(0),
        num_requests, min_queries, head_dim**-0.5 * 1.4426950408889634,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=cache.k.shape[1],
        QUERIES=queries, PADDED_GROUP=padded_group, KEYS=tiles.keys, BLOCK_D=block_d,
        STAGES=tiles.num_stages, WINDOW=sliding_window or 0, HAS_SINKS=sinks is not None,
        HAS_SCALES=cache.k_scale is not None, num_warps=tiles.num_warps,
    )  # fmt: skip
