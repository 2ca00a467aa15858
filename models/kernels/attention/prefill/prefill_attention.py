"""Paged causal attention of chunks of queries of any lengths."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from models.forward_context import AttentionMetadata
from models.kernels.attention.cache.cache_tensors import cache_tensors
from models.kernels.attention.configurations import hopper_tiles, prefill_tiles
from models.kernels.attention.online_softmax import attend_keys, attend_new_keys
from models.kernels.attention.prefill.hopper_attention import hopper_attention
from models.kernels.attention.prefill.tile_parts import (
    add_parts,
    first_masked,
    keys_of_part,
    part_of_tile,
    parts_of,
    split_tiles,
    write_part,
)
from models.kernels.attention.prefill.widened_cache import all_fit, widen
from models.kernels.attention.request_search import request_of_tile
from models.kernels.attention.store_heads import store_heads
from models.kernels.launching.copy_engine import aligned_heads
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

_PROGRAMS_OF_REST = 32
"""Programs of each kv head that share what hopper_attention left, mostly nothing."""

_METADATA = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "min_queries", "num_tiles", "num_splits", "output_scale_stride",
]  # fmt: skip  # specialising on these would compile again while serving


class PrefillForm(NamedTuple):
    """All that a build of the kernel is made for.

    num_kv_heads to has_scales: as in DecodeForm.
    has_prefix: takes chunks after cached tokens; others without it.
    queries: tokens of a tile.
    padded_group, block_d: powers of two that hold a group and a head.
    keys, stages: of AttentionTiles.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int
    soft_cap: float
    has_sinks: bool
    has_scales: bool
    has_prefix: bool
    queries: int
    padded_group: int
    block_d: int
    keys: int
    stages: int


class NewKeys(NamedTuple):
    """A step's keys and values, as the copy engine reads them, and columns from head to head."""

    k: Any
    v: Any
    k_stride: Any
    v_stride: Any


class Outputs(NamedTuple):
    """Where heads are stored; as in store_heads, with the distance of the next head's scale."""

    heads: Any
    scales: Any
    scale_stride: Any


class Requests(NamedTuple):
    """Tensors of AttentionMetadata, the entries of a row of block_tables, and key_ends or None."""

    block_tables: Any
    seq_lens: Any
    query_start: Any
    table_stride: Any
    key_ends: Any


@triton.jit
def _place_of(tile, requests, num_requests, min_queries, form: tl.constexpr):
    """Returns a tile's request and first query, and whether this form of the kernel takes it."""
    request = request_of_tile(tile, requests.query_start, num_requests, form.queries)
    query_start = tl.load(requests.query_start + request)
    num_queries = tl.load(requests.query_start + request + 1) - query_start
    num_cached = tl.load(requests.seq_lens + request) - num_queries
    first_query = (tile - query_start // form.queries - request) * form.queries
    is_mine = (num_cached > 0) == form.has_prefix
    is_mine = is_mine & (first_query < num_queries) & (num_queries >= min_queries)
    return request, first_query, is_mine


@triton.jit
def _attend_tile(
    q_ptr, cache, new, outputs, requests, sinks_ptr, parts, request, first_query, kv_head, place,
    part, num_parts, scale_log2, form: tl.constexpr,
):  # fmt: skip
    """Attends neighbouring tokens, the heads of one kv head each, to their prefixes.

    With parts, to one of num_parts parts of them, whose results go to `place` if there are several.
    """
    query_start = tl.load(requests.query_start + request)
    num_queries = tl.load(requests.query_start + request + 1) - query_start
    num_cached = 0  # which the compiler makes use of
    if form.has_prefix:
        num_cached = tl.load(requests.seq_lens + request) - num_queries
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
    acc = tl.full([form.queries * form.padded_group, form.block_d], 0.0, tl.float32)
    highest, total = _before_keys(sinks_ptr, head, kv_head, part, parts is not None, form)
    diagonal = first_masked(num_cached + first_query, form)
    end = num_cached + tl.minimum(first_query + form.queries, num_queries)
    last, own = positions, None
    if requests.key_ends is not None:
        ends = tl.load(requests.key_ends + token, mask=queries < num_queries, other=0)
        last, own, end = ends - 1, positions, tl.max(ends, 0)
    start = 0
    if parts is not None:
        start, diagonal, end = keys_of_part(part, num_parts, diagonal, end, form.keys, form.window)
    if form.has_prefix:
        table_ptr = requests.block_tables + request.to(tl.int64) * requests.table_stride
        if form.window == 0:
            acc, highest, total = attend_keys(
                q, acc, highest, total, start, diagonal, last, table_ptr, cache, kv_head, dims,
                scale_log2, False, 0, form,
            )  # fmt: skip
        acc, highest, total = attend_keys(
            q, acc, highest, total, diagonal, end, last, table_ptr, cache, kv_head, dims,
            scale_log2, True, form.window, form, own=own,
        )  # fmt: skip
    else:
        if form.window == 0:
            acc, highest, total = attend_new_keys(
                q, acc, highest, total, 0, diagonal, last, new, query_start, kv_head,
                scale_log2, False, 0, form,
            )  # fmt: skip
        acc, highest, total = attend_new_keys(
            q, acc, highest, total, diagonal, end, last, new, query_start, kv_head, scale_log2,
            True, form.window, form, own=own,
        )  # fmt: skip
    # A dummy request has no keys; its output is zero.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if parts is not None and num_parts > 1:
        at_rows = place * (form.queries * form.padded_group)
        at_rows += ((queries - first_query) * num_parts + part) * form.group + head
        lse = highest + tl.log2(total)
        write_part(acc, lse, at_rows, dims, in_tile, in_rows, parts, form.head_dim)
    else:
        at_scales = (kv_head * form.group + head) * outputs.scale_stride + token
        store_heads(
            acc, outputs.heads, outputs.scales, at_heads, at_scales, in_tile, in_rows, q.dtype
        )


@triton.jit
def _before_keys(sinks_ptr, head, kv_head, part, HAS_PARTS: tl.constexpr, form: tl.constexpr):
    """Returns the highest score and the total of rows before they see any key."""
    highest = tl.full(head.shape, float("-inf"), tl.float32)
    total = tl.full(head.shape, 0.0, tl.float32)
    if form.has_sinks:
        # Scores without keys count as if seen first.
        at_sinks = sinks_ptr + kv_head * form.group + head
        sinks = tl.load(at_sinks, mask=head < form.group, other=0.0)
        highest = sinks.to(tl.float32) * _LOG2_E
        total = tl.full(head.shape, 1.0, tl.float32)
        if HAS_PARTS:
            highest = tl.where(part == 0, highest, float("-inf"))
            total = tl.where(part == 0, total, 0.0)
    return highest, total


@triton.jit(do_not_specialize=_METADATA)
def _prefill_kernel(
    q_ptr, cache, new_k, new_v, new_k_stride, new_v_stride, output_ptr, output_scale_ptr,
    block_tables_ptr, seq_lens_ptr, query_start_ptr, key_ends_ptr, sinks_ptr, is_done_ptr,
    is_left_ptr, parts,
    table_stride, num_requests, min_queries, num_tiles, num_splits, output_scale_stride, scale_log2,
    form: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attends the chunks after cached tokens (has_prefix), or those without, a tile a program.

    After another kernel it takes what that left, as few programs with all tiles: is_done_ptr is not
    0 for requests to skip, is_left_ptr whether there are others. Else both are None.
    Unless parts is None, up to num_splits programs share the keys of a tile: tile_parts.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    kv_head = tl.program_id(0)
    new = NewKeys(new_k, new_v, new_k_stride, new_v_stride)
    outputs = Outputs(output_ptr, output_scale_ptr, output_scale_stride)
    requests = Requests(block_tables_ptr, seq_lens_ptr, query_start_ptr, table_stride, key_ends_ptr)
    # The last tiles of a chunk have the most keys; they start first.
    tile = num_tiles - 1 - tl.program_id(1)
    if is_done_ptr is None:
        request, first_query, is_mine = _place_of(tile, requests, num_requests, min_queries, form)
        place, part, num_parts = 0, 0, 1
        if parts is not None:
            place, part, num_parts = part_of_tile(
                request, first_query, is_mine, kv_head, tile, num_splits, requests, parts.plan, form
            )
            is_mine = is_mine & (part < num_parts)
        if not is_mine:
            return
        _attend_tile(
            q_ptr, cache, new, outputs, requests, sinks_ptr, parts, request, first_query, kv_head,
            place, part, num_parts, scale_log2, form,
        )  # fmt: skip
    else:
        if tl.load(is_left_ptr) == 0:
            return
        for each in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
            request, first_query, is_mine = _place_of(
                num_tiles - 1 - each, requests, num_requests, min_queries, form
            )
            if is_mine & (tl.load(is_done_ptr + request) == 0):
                _attend_tile(
                    q_ptr, cache, new, outputs, requests, sinks_ptr, None, request, first_query,
                    kv_head, 0, 0, 1, scale_log2, form,
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
    key_ends: torch.Tensor | None = None,
) -> None:
    """Attends each query of longer chunks to its sequence's keys up to its own, or to key_ends.

    A chunk that begins its sequence reads keys where they were computed; a later chunk reads all
    keys through the block table. hopper_attention does both on GPUs of compute capability 9.0,
    without key_ends; an 8-bit cache's keys it reads from copies, as far as widen has room.
    Elsewhere these are two kernels, as one would run half the programs at a time: 8192 tokens took
    1270 us instead of 960, and 764 instead of about 610 after a prefix (H200, 32 heads, 8 kv heads
    of 128, 2026-11). Grids depend on T, R and Hk only and the host reads nothing, so launches may
    be captured.
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
    key_ends: [T] int32 of ImageMetadata.

    Source: Dao 2023, "FlashAttention-2", section 3.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    num_requests = metadata.seq_lens.shape[0]
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    k, v = aligned_heads(k), aligned_heads(v)
    is_done, is_left, has_room = None, None, False
    dtype = cache.k.dtype if cache.k_scale is None else q.dtype
    hopper = hopper_tiles(q, dtype, cache.k.shape[1], num_kv_heads)
    # The kernel for Hopper knows neither caps, chunks nor keys after a query's own.
    is_plain = not soft_cap and (sliding_window or 0) >= 0 and key_ends is None
    if hopper is not None and metadata.workspace is not None and is_plain:
        readable = cache, metadata
        if cache.k_scale is not None:
            copies = widen(
                cache, metadata, dtype,
                keys=hopper.keys, min_queries=min_queries, sliding_window=sliding_window,
            )  # fmt: skip
            readable = copies.cache, copies.metadata
            is_done, is_left = copies.is_ready, copies.is_lacking
            has_room = all_fit(metadata, cache.k.shape[1], copies.num_blocks, min_queries)
        hopper_attention(
            q, k, v, *readable, output, metadata.workspace.counters, hopper, is_ready=is_done,
            output_scale=output_scale, min_queries=min_queries, sliding_window=sliding_window,
            sinks=sinks, scale=scale,
        )  # fmt: skip
        if is_done is None:
            return
    for has_prefix in _forms(metadata, is_done):
        tiles = prefill_tiles(q.dtype, block_d, has_prefix=has_prefix, device=q.device)
        queries, launch = _launcher(
            num_heads, num_kv_heads, head_dim, cache.k.shape[1], tiles, sliding_window or 0,
            sinks is not None, cache.k_scale is not None, has_prefix, soft_cap,
            q.device,
        )  # fmt: skip
        if has_room and launch.is_built:
            continue
        new_k, new_v = (_described(x, [tiles.keys, block_d]) for x in (k, v))
        num_tiles = num_tokens // queries + num_requests
        num_programs = num_tiles if is_left is None else min(num_tiles, _PROGRAMS_OF_REST)
        shared = None
        if has_prefix and is_done is None and key_ends is None:
            shared = split_tiles(
                metadata, num_tokens=num_tokens, num_pieces=num_tiles * num_kv_heads,
                rows=queries * triton.next_power_of_2(num_heads // num_kv_heads), head_dim=head_dim,
            )  # fmt: skip
        num_splits = None if shared is None else max(1, shared.num_shares)
        launch(
            (num_kv_heads, num_programs, num_splits or 1),
            q, cache_tensors(cache), new_k, new_v, k.stride(1), v.stride(1), output, output_scale,
            metadata.block_tables, metadata.seq_lens, metadata.query_start_loc, key_ends,
            q if sinks is None else sinks, is_done, is_left, parts_of(shared),
            metadata.block_tables.stride(0), num_requests, min_queries, num_tiles, num_splits,
            0 if output_scale is None else output_scale.stride(1), scale * LOG2_E,
        )  # fmt: skip
        if shared is not None:
            add_parts(q, output, shared, output_scale=output_scale, num_kv_heads=num_kv_heads)


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
    has_prefix: bool,
    soft_cap: float,
    device: torch.device,
) -> tuple[int, Launch]:
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    queries = max(1, tiles.rows // padded_group)
    form = PrefillForm(
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size,
        window=window, soft_cap=soft_cap, has_sinks=has_sinks, has_scales=has_scales,
        has_prefix=has_prefix, queries=queries, padded_group=padded_group,
        block_d=max(16, triton.next_power_of_2(head_dim)), keys=tiles.keys, stages=tiles.num_stages,
    )  # fmt: skip
    options = launch_options(device)
    return queries, Launch(_prefill_kernel, form=form, num_warps=tiles.num_warps, **options)


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
