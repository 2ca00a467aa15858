"""Attention of requests with drafts to their own keys, after the prefixes that they share.

The queries of a request, with the heads of one kv head, are the rows of a tile. The program of a
tile's first part of keys begins its softmax with what prefix_attention left.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kernels.attention.cache.cache_tensors import cache_tensors
from models.kernels.attention.decode.prefix_attention import SharedPrefixes
from models.kernels.attention.decode.prefix_parts import SLOTS, fold_prefixes
from models.kernels.attention.online_softmax import attend_keys, see_nothing, see_sinks
from models.kernels.attention.prefill.tile_parts import (
    LEAST_PART,
    NUM_PLANNED,
    add_parts,
    parts_of,
    split_tiles,
    write_part,
)
from models.kernels.attention.store_heads import store_heads
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kv_cache import KVCacheData
from models.operands.base_two import LOG2_E

_MOST_ROWS = 64
_KEYS, _STAGES, _WARPS = 64, 3, 4
_BYTES_OF_STAGE = 32 * 1024
"""Rows and keys of a tile, stages of keys and values of this many bytes, and warps."""

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "own_lens_ptr", "tile_slots_ptr",
    "tiles_ptr", "table_stride", "num_splits", "output_scale_stride",
]  # fmt: skip  # specialising on these would compile again while serving


class DraftForm(NamedTuple):
    """All that a build of the kernel is made for.

    num_kv_heads to has_scales: as in DecodeForm.
    padded_group, block_d: powers of two that hold a group and a head.
    queries: tokens of a tile. tiles: of a request. most_queries: tokens of a request.
    keys, stages: as in AttentionTiles.
    prefix_programs: of prefix_attention.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    soft_cap: float
    has_sinks: bool
    has_scales: bool
    padded_group: int
    block_d: int
    queries: int
    tiles: int
    most_queries: int
    keys: int
    stages: int
    prefix_programs: int


@triton.jit
def _plan_part(
    first_token, num_tokens, kv_head, part, num_parts, num_splits, plan_ptr, form: tl.constexpr
):
    """Writes a program's line of the plan of tile_parts; returns the place of its tile's results.

    num_parts: of the tile; 0: there is no tile.
    """
    place = (tl.program_id(1) * form.num_kv_heads + kv_head) * num_splits
    line_ptr = plan_ptr + (1 + place + part) * NUM_PLANNED
    is_shared = num_splits > 1
    tl.store(line_ptr, tl.where((part == 0) & (num_parts > 1), num_parts, 0), mask=is_shared)
    tl.store(line_ptr + 1, first_token, mask=is_shared)
    tl.store(line_ptr + 2, num_tokens, mask=is_shared)
    tl.store(line_ptr + 3, kv_head, mask=is_shared)
    num_places = tl.num_programs(0) * tl.num_programs(1) * num_splits
    tl.store(plan_ptr, num_places, mask=is_shared & (place + part == 0))
    return place


@triton.jit(do_not_specialize=_VARYING)
def draft_kernel(
    q_ptr, cache, output_ptr, output_scale_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr,
    own_lens_ptr, tile_slots_ptr, tiles_ptr, prefix_parts, sinks_ptr, parts, table_stride,
    num_splits, output_scale_stride, scale_log2, form: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attends a tile of a request's queries to one part of its own keys.

    Takes requests of 2 to most_queries tokens. Up to num_splits programs share the keys of a tile:
    tile_parts.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    kv_head = tl.program_id(0)
    request = (tl.program_id(1) // form.tiles).to(tl.int64)
    first_query = tl.program_id(1) % form.tiles * form.queries
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    own_len = tl.load(own_lens_ptr + request)
    is_mine = (num_queries >= 2) & (num_queries <= form.most_queries) & (first_query < num_queries)
    part = tl.program_id(2)
    num_parts = tl.maximum(tl.minimum((own_len - num_queries) // LEAST_PART, num_splits), 1)
    at_partials = _plan_part(
        query_start + first_query, tl.minimum(num_queries - first_query, form.queries),
        kv_head, part, tl.where(is_mine, num_parts, 0), num_splits, parts.plan, form,
    )  # fmt: skip
    if not (is_mine & (part < num_parts)):
        return

    rows = tl.arange(0, form.queries * form.padded_group)
    dims = tl.arange(0, form.block_d)
    queries = first_query + rows // form.padded_group
    heads = rows % form.padded_group
    in_rows = (queries < num_queries) & (heads < form.group)
    in_tile = in_rows[:, None] & (dims < form.head_dim)[None, :]
    token = (query_start + queries).to(tl.int64)
    at_heads = ((token * form.num_kv_heads + kv_head) * form.group + heads)[:, None] * form.head_dim
    at_heads += dims[None, :]
    q = tl.load(q_ptr + at_heads, mask=in_tile, other=0.0)
    acc = tl.full([form.queries * form.padded_group, form.block_d], 0.0, tl.float32)
    highest, total = see_nothing(form.queries * form.padded_group)
    if part == 0:
        if form.has_sinks:
            highest, total = see_sinks(sinks_ptr + kv_head * form.group, heads, in_rows)
        acc, highest, total = fold_prefixes(
            acc, highest, total, queries, heads, in_rows, dims, tile_slots_ptr + request * SLOTS,
            tiles_ptr, prefix_parts, kv_head, form,
        )  # fmt: skip
    first = seq_len - own_len
    num_tiles = tl.cdiv(own_len, form.keys)
    start = first + part * num_tiles // num_parts * form.keys
    end = tl.minimum(first + (part + 1) * num_tiles // num_parts * form.keys, seq_len)
    acc, highest, total = attend_keys(
        q, acc, highest, total, start, end, seq_len - num_queries + queries,
        block_tables_ptr + request * table_stride, cache, kv_head, dims, scale_log2, True, 0, form,
    )  # fmt: skip
    # A dummy request has no keys; its output is zero.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if num_parts > 1:
        at_rows = at_partials * (form.queries * form.padded_group)
        at_rows += ((queries - first_query) * num_parts + part) * form.group + heads
        lse = highest + tl.log2(total)
        write_part(acc, lse, at_rows, dims, in_tile, in_rows, parts, form.head_dim)
    else:
        at_scales = (kv_head * form.group + heads) * output_scale_stride + token
        store_heads(
            acc, output_ptr, output_scale_ptr, at_heads, at_scales, in_tile, in_rows, q.dtype
        )


def attend_drafts(
    q: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    prefix: SharedPrefixes,
    *,
    output_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> int:
    """Attends the queries of requests of few tokens, at least two, to their keys up to their own.

    The cache has the step's keys and values, too. Layers have no window. The grid is constant and
    the host reads nothing, so a launch may be captured. Arguments are as in prefill_attention.

    prefix: of this step, by decode_attention.

    Returns:
        Up to how many tokens of a request were attended.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads, num_requests = cache.k.shape[2], metadata.seq_lens.shape[0]
    form, launch = _launcher(
        num_heads, num_kv_heads, head_dim, cache.k.shape[1], prefix.plan.num_queries,
        sinks is not None, cache.k_scale is not None, soft_cap, prefix.num_programs, q.dtype,
        q.device,
    )  # fmt: skip
    num_tiles = num_requests * form.tiles
    # Tiles may be shared whatever the number of tokens: one build is for all steps.
    shared = split_tiles(
        metadata, num_tokens=1, num_pieces=num_tiles * num_kv_heads,
        rows=form.queries * form.padded_group, head_dim=head_dim,
    )  # fmt: skip
    assert shared is not None, "prefix_attention had a workspace"
    num_splits = max(1, shared.num_shares)
    launch(
        (num_kv_heads, num_tiles, num_splits),
        q, cache_tensors(cache), output, output_scale, metadata.block_tables, metadata.seq_lens,
        metadata.query_start_loc, prefix.plan.own_lens, prefix.plan.tile_slots, prefix.plan.tiles,
        prefix.parts, q if sinks is None else sinks, parts_of(shared),
        metadata.block_tables.stride(0), num_splits,
        0 if output_scale is None else output_scale.stride(1), scale * LOG2_E,
    )  # fmt: skip
    add_parts(q, output, shared, output_scale=output_scale, num_kv_heads=num_kv_heads)
    return form.most_queries


@lru_cache
def _launcher(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    most_queries: int,
    has_sinks: bool,
    has_scales: bool,
    soft_cap: float,
    prefix_programs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[DraftForm, Launch]:
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    most = max(1, _MOST_ROWS // padded_group)
    # Tensor cores take rows by 16.
    queries = max(min(triton.next_power_of_2(most_queries), most), -(-16 // padded_group))
    keys = max(16, min(_KEYS, _BYTES_OF_STAGE // (2 * block_d * dtype.itemsize)))
    form = DraftForm(
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size,
        soft_cap=soft_cap, has_sinks=has_sinks, has_scales=has_scales, padded_group=padded_group,
        block_d=block_d, queries=queries, tiles=-(-most_queries // queries),
        most_queries=most_queries, keys=keys, stages=_STAGES, prefix_programs=prefix_programs,
    )  # fmt: skip
    return form, Launch(draft_kernel, form=form, num_warps=_WARPS, **launch_options(device))
