"""Paged causal attention of chunks of queries of any lengths."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from models.forward_context import AttentionMetadata
from models.kv_cache import KVCacheData
from models.ops.operands.base_two import LOG2_E
from models.ops.triton.attention.cache.cache_scales import cache_scales
from models.ops.triton.attention.configurations import Tiles, prefill_tiles
from models.ops.triton.attention.online_softmax import attend_keys, attend_new_keys
from models.ops.triton.attention.prefill.hopper_attention import hopper_attention
from models.ops.triton.attention.prefill.hopper_configurations import hopper_tiles
from models.ops.triton.attention.prefill.tile_parts import (
    add_parts,
    keys_of_part,
    part_of_tile,
    parts_of,
    split_tiles,
    write_part,
)
from models.ops.triton.attention.prefill.widened_cache import widen
from models.ops.triton.attention.request_search import request_of_tile
from models.ops.triton.attention.store_heads import store_heads
from models.ops.triton.launching.copy_engine import aligned_heads
from models.ops.triton.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.ops.triton.launching.launch import Launch

_LOG2_E = tl.constexpr(LOG2_E)

_PROGRAMS_OF_REST = 32
"""Programs of each kv head that share what hopper_attention left, mostly nothing."""

_METADATA = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "min_queries", "num_tiles", "num_splits", "output_scale_stride",
]  # fmt: skip  # specialising on these would compile again while serving


@triton.jit
def _place_of(
    tile, seq_lens_ptr, query_start_ptr, num_requests, min_queries, QUERIES: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
):  # fmt: skip
    """Returns a tile's request and first query, and whether this form of the kernel takes it."""
    request = request_of_tile(tile, query_start_ptr, num_requests, QUERIES)
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    num_cached = tl.load(seq_lens_ptr + request) - num_queries
    first_query = (tile - query_start // QUERIES - request) * QUERIES
    is_mine = (num_cached > 0) == HAS_PREFIX
    is_mine = is_mine & (first_query < num_queries) & (num_queries >= min_queries)
    return request, first_query, is_mine


@triton.jit
def _attend_tile(
    request, first_query, kv_head, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, new_k, new_v,
    new_k_stride, new_v_stride, output_ptr, output_scale_ptr, block_tables_ptr, seq_lens_ptr,
    query_start_ptr, sinks_ptr, partials_ptr, lse_ptr, place, part, num_parts, table_stride,
    output_scale_stride, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, PADDED_GROUP: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_PREFIX: tl.constexpr,
    HAS_PARTS: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Attends QUERIES neighbouring tokens, the heads of one kv head each, to their prefixes.

    HAS_PARTS: to one of num_parts parts of them, whose results go to `place` if there are several.
    """
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    num_cached = 0  # which the compiler makes use of
    if HAS_PREFIX:
        num_cached = tl.load(seq_lens_ptr + request) - num_queries
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
    acc = tl.zeros([QUERIES * PADDED_GROUP, BLOCK_D], tl.float32)
    highest = tl.full([QUERIES * PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * PADDED_GROUP], tl.float32)
    if HAS_SINKS:
        # Scores without keys count as if seen first.
        sinks = tl.load(sinks_ptr + kv_head * GROUP + head, mask=head < GROUP, other=0.0)
        highest = sinks.to(tl.float32) * _LOG2_E
        total = tl.full([QUERIES * PADDED_GROUP], 1.0, tl.float32)
        if HAS_PARTS:
            highest = tl.where(part == 0, highest, float("-inf"))
            total = tl.where(part == 0, total, 0.0)
    # Every query sees the keys up to the first one's position; whole tiles of them need no mask.
    diagonal = (num_cached + first_query + 1) // KEYS * KEYS
    end = num_cached + tl.minimum(first_query + QUERIES, num_queries)
    if WINDOW > 0:
        # From the first query's first key on, any tile may need the mask of a query's window.
        diagonal = tl.maximum(num_cached + first_query + 1 - WINDOW, 0) // KEYS * KEYS
    start = 0
    if HAS_PARTS:
        start, diagonal, end = keys_of_part(part, num_parts, diagonal, end, KEYS, WINDOW)
    if HAS_PREFIX:
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        if WINDOW == 0:
            acc, highest, total = attend_keys(
                q, acc, highest, total, start, diagonal, positions, table_ptr, k_ptr, v_ptr,
                k_scale_ptr, v_scale_ptr, kv_head, dims, scale_log2,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, False, STAGES, 0, HAS_SCALES,
                SOFT_CAP,
            )  # fmt: skip
        acc, highest, total = attend_keys(
            q, acc, highest, total, diagonal, end, positions, table_ptr, k_ptr, v_ptr, k_scale_ptr,
            v_scale_ptr, kv_head, dims, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, True, STAGES, WINDOW, HAS_SCALES,
            SOFT_CAP,
        )  # fmt: skip
    else:
        if WINDOW == 0:
            acc, highest, total = attend_new_keys(
                q, acc, highest, total, 0, diagonal, positions, new_k, new_v, query_start,
                kv_head * new_k_stride, kv_head * new_v_stride, scale_log2, KEYS, False, STAGES, 0,
                SOFT_CAP,
            )  # fmt: skip
        acc, highest, total = attend_new_keys(
            q, acc, highest, total, diagonal, end, positions, new_k, new_v, query_start,
            kv_head * new_k_stride, kv_head * new_v_stride, scale_log2, KEYS, True, STAGES, WINDOW,
            SOFT_CAP,
        )  # fmt: skip
    # A dummy request has no keys; its output is zero.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if HAS_PARTS and num_parts > 1:
        at_rows = place * (QUERIES * PADDED_GROUP)
        at_rows += ((queries - first_query) * num_parts + part) * GROUP + head
        write_part(
            acc, highest + tl.log2(total), at_rows, dims, in_tile, in_rows, partials_ptr, lse_ptr,
            HEAD_DIM,
        )  # fmt: skip
    else:
        at_scales = (kv_head * GROUP + head) * output_scale_stride + token
        store_heads(
            acc, output_ptr, output_scale_ptr, at_heads, at_scales, in_tile, in_rows, q.dtype
        )


@triton.jit(do_not_specialize=_METADATA)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, new_k, new_v, new_k_stride, new_v_stride,
    output_ptr, output_scale_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr, sinks_ptr,
    is_done_ptr, is_left_ptr, partials_ptr, lse_ptr, plan_ptr, table_stride, num_requests,
    min_queries, num_tiles, num_splits, output_scale_stride, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, PADDED_GROUP: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_PREFIX: tl.constexpr,
    SOFT_CAP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attends the chunks after cached tokens (HAS_PREFIX), or those without, a tile a program.

    After another kernel it takes what that left, as few programs with all tiles: is_done_ptr is not
    0 for requests to skip, is_left_ptr whether there are others. Else both are None.
    Unless partials_ptr is None, up to num_splits programs share the keys of a tile: tile_parts.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    kv_head = tl.program_id(0)
    # The last tiles of a chunk have the most keys; they start first.
    tile = num_tiles - 1 - tl.program_id(1)
    if is_done_ptr is None:
        request, first_query, is_mine = _place_of(
            tile, seq_lens_ptr, query_start_ptr, num_requests, min_queries, QUERIES, HAS_PREFIX
        )
        place, part, num_parts = 0, 0, 1
        if partials_ptr is not None:
            place, part, num_parts = part_of_tile(
                request, first_query, is_mine, kv_head, tile, num_splits, seq_lens_ptr,
                query_start_ptr, plan_ptr, NUM_KV_HEADS, QUERIES, WINDOW,
            )  # fmt: skip
            is_mine = is_mine & (part < num_parts)
        if not is_mine:
            return
        _attend_tile(
            request, first_query, kv_head, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, new_k,
            new_v, new_k_stride, new_v_stride, output_ptr, output_scale_ptr, block_tables_ptr,
            seq_lens_ptr, query_start_ptr, sinks_ptr, partials_ptr, lse_ptr, place, part, num_parts,
            table_stride, output_scale_stride, scale_log2,
            NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, QUERIES, PADDED_GROUP, KEYS, BLOCK_D,
            STAGES, WINDOW, HAS_SINKS, HAS_SCALES, HAS_PREFIX, partials_ptr is not None, SOFT_CAP,
        )  # fmt: skip
    else:
        if tl.load(is_left_ptr) == 0:
            return
        for each in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
            request, first_query, is_mine = _place_of(
                num_tiles - 1 - each, seq_lens_ptr, query_start_ptr, num_requests, min_queries,
                QUERIES, HAS_PREFIX,
            )  # fmt: skip
            if is_mine & (tl.load(is_done_ptr + request) == 0):
                _attend_tile(
                    request, first_query, kv_head, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                    new_k, new_v, new_k_stride, new_v_stride, output_ptr, output_scale_ptr,
                    block_tables_ptr, seq_lens_ptr, query_start_ptr, sinks_ptr, None, None, 0, 0, 1,
                    table_stride, output_scale_stride, scale_log2,
                    NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, QUERIES, PADDED_GROUP, KEYS,
                    BLOCK_D, STAGES, WINDOW, HAS_SINKS, HAS_SCALES, HAS_PREFIX, False, SOFT_CAP,
                )  # fmt: skip


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    *,
    output_scale: torch.Tensor | None = None,
    min_queries: int,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> None:
    """Attends each query of longer chunks to its sequence's keys up to its own.

    A chunk that begins its sequence reads keys where they were computed; a later chunk reads all
    keys through the block table. hopper_attention does both on GPUs of compute capability 9.0; an
    8-bit cache's keys it reads from copies, as far as widen has room. Elsewhere these are two
    kernels, as one would run half the programs at a time: 8192 tokens took 1270 us instead of 960,
    and 764 instead of about 610 after a prefix (H200, 32 heads, 8 kv heads of 128, 2026-11). Grids
    depend on T, R and Hk only and the host reads nothing, so launches may be captured.
    T tokens, R requests, Hq/Hk query/kv heads, D head dim.

    q, output: [T, Hq, D], contiguous, possibly the same.
    k, v: [at least T, Hk, D], this step's, transformed and as precise as in the cache, which has
        them too; each token's heads contiguous.
    output_scale: with an FP8 output [T, Hq * D] its scales, of rounded_parts; D is 128.
    min_queries: skips requests with fewer query tokens.
    sliding_window: most keys that a query sees.
    sinks: [Hq], scores without keys.
    scale: factor of the scores.
    soft_cap: of scaled scores; 0 for none. hopper_attention has none.

    Source: Dao 2023, "FlashAttention-2", section 3.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    num_requests = metadata.seq_lens.shape[0]
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    k, v = aligned_heads(k), aligned_heads(v)
    is_done, is_left, all_fit = None, None, False
    dtype = cache.k.dtype if cache.k_scale is None else q.dtype
    hopper = hopper_tiles(q, dtype, cache.k.shape[1], num_kv_heads)
    if hopper is not None and metadata.workspace is not None and not soft_cap:
        readable = cache, metadata
        if cache.k_scale is not None:
            copies = widen(
                cache, metadata, dtype,
                keys=hopper.keys, min_queries=min_queries, sliding_window=sliding_window,
            )  # fmt: skip
            readable = copies.cache, copies.metadata
            is_done, is_left = copies.is_ready, copies.is_lacking
            all_fit = _all_fit(metadata, cache.k.shape[1], copies.num_blocks, min_queries)
        hopper_attention(
            q, k, v, *readable, output, metadata.workspace.counters, hopper, is_ready=is_done,
            output_scale=output_scale, min_queries=min_queries, sliding_window=sliding_window,
            sinks=sinks, scale=scale,
        )  # fmt: skip
        if is_done is None:
            return
    for has_prefix in _forms(metadata, is_done):
        tiles = prefill_tiles(q.dtype, block_d, has_prefix=has_prefix)
        queries, launch = _launcher(
            num_heads, num_kv_heads, head_dim, cache.k.shape[1], tiles, sliding_window or 0,
            sinks is not None, cache.k_scale is not None, has_prefix, soft_cap,
            q.device,
        )  # fmt: skip
        if all_fit and launch.is_built:
            continue
        new_k, new_v = (_described(x, [tiles.keys, block_d]) for x in (k, v))
        num_tiles = num_tokens // queries + num_requests
        num_programs = num_tiles if is_left is None else min(num_tiles, _PROGRAMS_OF_REST)
        shared = None
        if has_prefix and is_done is None:
            shared = split_tiles(
                metadata, num_tokens=num_tokens, num_pieces=num_tiles * num_kv_heads,
                rows=queries * triton.next_power_of_2(num_heads // num_kv_heads), head_dim=head_dim,
            )  # fmt: skip
        num_splits = None if shared is None else max(1, shared.num_shares)
        launch(
            (num_kv_heads, num_programs, num_splits or 1),
            q, cache.k, cache.v, *cache_scales(cache), new_k, new_v, k.stride(1), v.stride(1),
            output, output_scale, metadata.block_tables, metadata.seq_lens,
            metadata.query_start_loc, q if sinks is None else sinks, is_done, is_left,
            *parts_of(shared), metadata.block_tables.stride(0), num_requests, min_queries,
            num_tiles, num_splits, 0 if output_scale is None else output_scale.stride(1),
            scale * LOG2_E,
        )  # fmt: skip
        if shared is not None:
            add_parts(q, output, shared, output_scale=output_scale, num_kv_heads=num_kv_heads)


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
    has_prefix: bool,
    soft_cap: float,
    device: torch.device,
) -> tuple[int, Launch]:
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    queries = max(1, tiles.rows // padded_group)
    launch = Launch(
        _prefill_kernel, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, QUERIES=queries, PADDED_GROUP=padded_group, KEYS=tiles.keys,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), STAGES=tiles.num_stages, WINDOW=window,
        HAS_SINKS=has_sinks, HAS_SCALES=has_scales, HAS_PREFIX=has_prefix,
        SOFT_CAP=soft_cap, num_warps=tiles.num_warps, **launch_options(device),
    )  # fmt: skip
    return queries, launch


def _all_fit(
    metadata: AttentionMetadata, block_size: int, num_blocks: int, min_queries: int
) -> bool:
    """Returns whether num_blocks hold the keys of all later chunks, as far as the host knows."""
    if metadata.block_tables.numel() <= num_blocks:
        return True
    needed = [
        -(-chunk.num_keys // block_size)
        for chunk in metadata.chunks
        if chunk.num_keys > chunk.num_queries >= min_queries
    ]
    return len(metadata.chunks) > 0 and sum(needed) <= num_blocks


def _forms(metadata: AttentionMetadata, is_done: torch.Tensor | None) -> tuple[bool, ...]:
    """Returns which forms of the kernel a step may need: without and with cached tokens."""
    if is_done is not None:
        return (True,)
    if metadata.seq_lens.shape[0] > 1:
        return False, True
    return (metadata.max_seqlen_k > metadata.max_seqlen_q,)


def _described(x: torch.Tensor, tile: list[int]) -> TensorDescriptor:
    num_tokens, num_heads, head_dim = x.shape
    width = (num_heads - 1) * x.stride(1) + head_dim
    return TensorDescriptor(x, [num_tokens, width], [x.stride(0), 1], tile)
