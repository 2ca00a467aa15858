"""Attention of decoding requests to the keys that several of them share.

Up to TILE_QUERIES query tokens, with heads of one kv head, are the rows of one tile, so each shared
key is read once for all of them. Programs share the keys of all tiles; decode_attention and
draft_attention add each request's own keys to what they leave in the workspace: prefix_parts.

Source: Juravsky et al. 2024, "Hydragen: High-Throughput LLM Inference with Shared Prefixes".
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.forward_context import (
    MAX_PREFIX_TILES,
    TILE_QUERIES,
    AttentionMetadata,
    PrefixPlan,
)
from models.kernels.attention.cache.cache_tensors import cache_tensors
from models.kernels.attention.configurations import prefix_tiles
from models.kernels.attention.decode.newest_token import load_row, partners_of, transformed
from models.kernels.attention.decode.position_loops import attend_with_queries_as_rows
from models.kernels.attention.decode.prefix_parts import (
    PrefixParts,
    parts_of_tile,
    row_of_query,
    share_out,
    tile_of_part,
)
from models.kernels.attention.online_softmax import attend_keys, see_nothing
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.tuning.tiles import AttentionTiles
from models.kv_cache import KVCacheData
from models.operands.base_two import LOG2_E
from models.operands.head_transform import HeadTransform

_TILES = tl.constexpr(MAX_PREFIX_TILES)

_VARYING = [
    "block_tables_ptr", "tiles_ptr", "queries_ptr", "table_stride", "q_stride", "rotation_stride",
]  # fmt: skip  # specialising on these would compile again while serving


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """A step's keys and values before they are transformed and stored.

    k, v: [T, Hk, D], each token's heads contiguous, tokens whole heads apart.
    transform: of queries and keys.
    slot_mapping: [T] int64.
    """

    k: torch.Tensor
    v: torch.Tensor
    transform: HeadTransform
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Results of prefix_attention for the attention to requests' own keys.

    num_programs: programs of a kv head, an argument of share_out.
    """

    plan: PrefixPlan
    parts: PrefixParts
    num_programs: int


class PrefixForm(NamedTuple):
    """All that a build of the kernel is made for.

    num_kv_heads to soft_cap, has_scales to has_norm: as in DecodeForm.
    window: 0, for attend_with_queries_as_rows.
    heads: heads of a program, a power of two; a kv head has `slices` of them.
    rows: of a tile, TILE_QUERIES times heads.
    keys, stages: of AttentionTiles. num_programs: of a slice of a kv head.
    block_d: power of two that holds a head.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int
    soft_cap: float
    has_scales: bool
    has_new: bool
    has_norm: bool
    heads: int
    slices: int
    rows: int
    keys: int
    stages: int
    num_programs: int
    block_d: int


class Turn(NamedTuple):
    """How queries are transformed: a HeadTransform's tensors; in a kernel these are pointers."""

    cos: torch.Tensor
    sin: torch.Tensor
    q_weight: torch.Tensor


@triton.jit
def _load_queries(
    q_ptr, turn, token, kv_head, heads, in_rows, dims, q_stride, rotation_stride, eps,
    form: tl.constexpr,
):  # fmt: skip
    """Returns queries, [rows, block_d], transformed as decode attention transforms them."""
    in_tile = in_rows[:, None] & (dims < form.head_dim)[None, :]
    q_ptrs = q_ptr + (token * q_stride + kv_head * form.group + heads)[:, None] * form.head_dim
    q = tl.load(q_ptrs + dims[None, :], mask=in_tile, other=0.0)
    if form.has_new:
        partners = partners_of(dims, form.head_dim)
        partner = tl.load(q_ptrs + partners[None, :], mask=in_tile, other=0.0)
        at_turns = (token * rotation_stride)[:, None] * form.head_dim + dims[None, :]
        cos = tl.load(turn.cos + at_turns, mask=in_tile, other=0.0)
        sin = tl.load(turn.sin + at_turns, mask=in_tile, other=0.0)
        gain, partner_gain = 1.0, 1.0
        if form.has_norm:
            # Once for each row: what is computed takes the layout of the smallest load.
            gain = load_row(turn.q_weight, heads, dims, form.head_dim).to(tl.float32)
            partner_gain = load_row(turn.q_weight, heads, partners, form.head_dim).to(tl.float32)
        q = transformed(
            q, partner, gain, partner_gain, cos, sin, eps, form.head_dim, form.has_norm
        ).to(q_ptr.dtype.element_ty)
    return q


@triton.jit
def _attend_part(
    q_ptr, cache, block_tables_ptr, tiles_ptr, queries_ptr, parts, turn,
    table_stride, q_stride, rotation_stride, scale_log2, eps, kv_head, first_head, tile, split,
    part, first_part, count, form: tl.constexpr,
):  # fmt: skip
    """Attends a tile's queries to one part of their shared keys, and stores the result."""
    first_query = tl.load(tiles_ptr + tile)
    num_queries = tl.load(tiles_ptr + _TILES + tile)
    first_key = tl.load(tiles_ptr + 2 * _TILES + tile)
    num_keys = tl.load(tiles_ptr + 3 * _TILES + tile)
    leader = tl.load(tiles_ptr + 4 * _TILES + tile).to(tl.int64)
    table_ptr = block_tables_ptr + leader * table_stride
    rows = tl.arange(0, form.rows)
    dims = tl.arange(0, form.block_d)
    place = rows // form.heads
    heads = first_head + rows % form.heads
    in_rows = (place < num_queries) & (heads < form.group)
    token = tl.load(queries_ptr + first_query + place, mask=in_rows, other=0).to(tl.int64)
    q = _load_queries(
        q_ptr, turn, token, kv_head, heads, in_rows, dims, q_stride, rotation_stride, eps, form
    )
    start = first_key + split * part
    end = tl.minimum(start + part, first_key + num_keys)
    ends = tl.full([form.rows], 0, tl.int32) + end
    highest, total = see_nothing(form.rows)
    if form.has_scales:
        acc, highest, total = attend_with_queries_as_rows(
            q, ends, ends, highest, total, start, end, table_ptr, cache, kv_head, dims, scale_log2,
            form,
        )  # fmt: skip
    else:
        acc = tl.full([form.rows, form.block_d], 0.0, tl.float32)
        acc, highest, total = attend_keys(
            q, acc, highest, total, start, end, ends, table_ptr, cache, kv_head, dims, scale_log2,
            True, 0, form,
        )  # fmt: skip
    PROGRAMS: tl.constexpr = form.num_programs
    at_rows = row_of_query(kv_head, first_part, count, place, form.group, PROGRAMS)
    at_rows += split * form.group + heads
    in_tile = in_rows[:, None] & (dims < form.head_dim)[None, :]
    at_tile = at_rows[:, None] * form.head_dim + dims[None, :]
    tl.store(parts.partials + at_tile, acc * (1.0 / total)[:, None], mask=in_tile)
    tl.store(parts.lse + at_rows, highest + tl.log2(total), mask=in_rows)


@triton.jit(do_not_specialize=_VARYING)
def prefix_kernel(
    q_ptr, cache, block_tables_ptr, tiles_ptr, queries_ptr, parts, turn,
    table_stride, q_stride, rotation_stride, scale_log2, eps,
    form: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attends all tiles of a plan to their keys, about one part each program.

    Neighbouring programs of a tile's kv head have the parts of its keys, and other tiles with the
    same keys meet them in the cache of the GPU. Without shared keys all programs end at once.
    """
    let_next_start(DEPENDENT)
    part, num_parts, ends = share_out(tiles_ptr, form.num_programs)
    num_pieces = tl.max(ends[1], 0)
    wait_for_previous(DEPENDENT)
    kv_head = tl.program_id(0) // form.slices
    first_head = tl.program_id(0) % form.slices * form.heads
    for piece in range(tl.program_id(1), num_pieces, form.num_programs):
        tile = tile_of_part(piece, ends)
        first_part, count = parts_of_tile(tile, num_parts, ends)
        _attend_part(
            q_ptr, cache, block_tables_ptr, tiles_ptr, queries_ptr, parts, turn,
            table_stride, q_stride, rotation_stride, scale_log2, eps, kv_head, first_head, tile,
            piece - first_part, part, first_part, count, form,
        )  # fmt: skip


def prefix_attention(
    q: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    new: NewTokens | None,
    *,
    scale: float,
    soft_cap: float,
) -> SharedPrefixes | None:
    """Attends the queries of a plan's requests to the keys that they share.

    Arguments are as in decode_attention; layers have no window. The grid is constant and the host
    reads nothing, so a launch may be captured.

    Returns:
        The results for this stream's next kernels; None without a workspace or a plan.
    """
    plan, workspace = metadata.prefix_plan, metadata.workspace
    if plan is None or workspace is None:
        return None
    if workspace.prefix_partials is None or workspace.prefix_lse is None:
        return None
    _, num_heads, head_dim = q.shape
    has_norm = new is not None and new.transform.q_weight is not None
    tiles = prefix_tiles(q.dtype, cache.k.dtype, head_dim, q.device)
    form, launch = _launcher(
        num_heads, cache.k.shape[2], head_dim, cache.k.shape[1], tiles, soft_cap,
        cache.k_scale is not None, new is not None, has_norm, q.device,
    )  # fmt: skip
    turn, eps = Turn(q, q, q), 0.0
    if new is not None:
        weight = q if new.transform.q_weight is None else new.transform.q_weight
        turn, eps = Turn(new.transform.cos, new.transform.signed_sin, weight), new.transform.eps
    parts = PrefixParts(workspace.prefix_partials, workspace.prefix_lse)
    launch(
        (form.num_kv_heads * form.slices, form.num_programs, 1),
        q, cache_tensors(cache), metadata.block_tables, plan.tiles, plan.queries, parts, turn,
        metadata.block_tables.stride(0),
        *(x.stride(0) // head_dim for x in (q, turn.cos)), scale * LOG2_E, eps,
    )  # fmt: skip
    return SharedPrefixes(plan=plan, parts=parts, num_programs=form.num_programs)


@lru_cache
def _launcher(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tiles: AttentionTiles,
    soft_cap: float,
    has_scales: bool,
    has_new: bool,
    has_norm: bool,
    device: torch.device,
) -> tuple[PrefixForm, Launch]:
    group = num_heads // num_kv_heads
    heads = min(triton.next_power_of_2(group), tiles.rows // TILE_QUERIES)
    slices = -(-group // heads)
    form = PrefixForm(
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size, window=0,
        soft_cap=soft_cap, has_scales=has_scales, has_new=has_new, has_norm=has_norm,
        heads=heads, slices=slices, rows=TILE_QUERIES * heads,
        keys=tiles.keys, stages=tiles.num_stages,
        num_programs=max(1, tiles.num_programs // (num_kv_heads * slices)),
        block_d=max(16, triton.next_power_of_2(head_dim)),
    )  # fmt: skip
    launch = Launch(prefix_kernel, form=form, num_warps=tiles.num_warps, **launch_options(device))
    return form, launch
