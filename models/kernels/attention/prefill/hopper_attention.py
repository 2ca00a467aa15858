"""Paged causal attention of chunks on GPUs of compute capability 9.0.

A program has three concurrent parts: one warp finds work and has the copy engine load it into rings
in shared memory (hopper_copies), and two warpgroups compute (hopper_softmax).

Source: Shah et al. 2024, "FlashAttention-3", sections 3.1 and 3.2.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.forward_context import AttentionMetadata
from models.kernels.attention.prefill.hopper_copies import (
    CHUNK_DIMS,
    arrivals_of_queries,
    copy_all,
    is_packed,
    num_notes,
    rows_of_token,
)
from models.kernels.attention.prefill.hopper_results import ROWS
from models.kernels.attention.prefill.hopper_softmax import attend_all
from models.kernels.attention.prefill.tile_parts import add_parts, parts_of, share_tiles
from models.kernels.gpu import num_multiprocessors
from models.kernels.launching.dependent_launch import launch_options, let_next_start
from models.kernels.launching.launch import Launch
from models.kernels.tuning.tiles import AttentionTiles
from models.kv_cache import KVCacheData
from models.operands.base_two import LOG2_E

COMPUTING_REGISTERS = gl.constexpr(224)
COPYING_REGISTERS = gl.constexpr(56)
"""Registers per thread of each part: two computing parts and one copying part use 504 of 512."""

_METADATA = [
    "table_stride", "num_requests", "min_queries", "num_shares", "output_scale_stride",
]  # fmt: skip


class HopperForm(NamedTuple):
    """All that a build of the kernel is made for, with the tiles of its descriptors.

    num_kv_heads, group: kv heads, and query heads of each.
    block_size: slots of a block. window: 0 for none.
    stages: of AttentionTiles.
    has_sinks: heads have a score without a key.
    part: as of hopper_attention.
    has_ready: requests may be skipped.
    """

    num_kv_heads: int
    group: int
    block_size: int
    window: int
    stages: int
    has_sinks: bool
    part: int
    has_ready: bool


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    """Returns barriers in shared memory that wait for `count` arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.constexpr_function
def _num_slots(head_dim):
    """Returns the pieces of work in shared memory.

    The next one's queries load while one is computed, unless heads are too large for both.
    """
    return 2 if head_dim <= 128 else 1


@gluon.constexpr_function
def _spare_layout():
    """Each thread's elements of a half of the sums, 16 bytes side by side."""
    registers = [[0, 1], [8, 0]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0]]
    rest = [[0, 8], [0, 16], [0, 32]]
    return gl.SharedLinearLayout([*registers, *lanes, *warps, *rest])


@gluon.jit(do_not_specialize=_METADATA)
def _hopper_attention_kernel(
    queries, new_k, new_v, k_cache, v_cache, output_ptr, output_scale_ptr, ticket_ptr,
    block_tables_ptr, seq_lens_ptr, query_start_ptr, sinks_ptr, is_ready_ptr, parts,
    table_stride, num_requests, min_queries, num_shares, output_scale_stride, scale_log2,
    form: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Attends tiles of neighbouring tokens, the heads of one kv head each, to their prefixes."""
    let_next_start(DEPENDENT)
    KEYS: gl.constexpr = new_k.block_type.shape[0]
    HEAD_DIM: gl.constexpr = new_k.block_type.shape[1]
    SLOTS: gl.constexpr = _num_slots(HEAD_DIM)
    layout: gl.constexpr = new_k.layout
    q_tiles = gl.allocate_shared_memory(new_k.dtype, [2 * SLOTS, ROWS, HEAD_DIM], layout)
    k_tiles = gl.allocate_shared_memory(new_k.dtype, [form.stages, KEYS, HEAD_DIM], layout)
    v_tiles = gl.allocate_shared_memory(new_k.dtype, [form.stages, KEYS, HEAD_DIM], layout)
    notes = gl.allocate_shared_memory(
        gl.int32,
        [SLOTS * num_notes(parts is not None), 1],
        gl.SwizzledSharedLayout(1, 1, 1, [0]),
    )
    q_ring = (
        q_tiles,
        notes,
        _barriers(SLOTS, arrivals_of_queries(form.group)),
        _barriers(SLOTS, 2),
    )
    k_ring = (k_tiles, _barriers(form.stages, 1))
    v_ring = (v_tiles, _barriers(form.stages, 1))
    outputs = (output_ptr, output_scale_ptr, output_scale_stride)
    released = _barriers(form.stages, 2)
    cleared = _barriers(1, 1).index(0)
    spares = (None,)
    if form.part > 0 and KEYS * HEAD_DIM > 64 * 128:
        both = gl.allocate_shared_memory(gl.float32, [2, ROWS, HEAD_DIM // 2], _spare_layout())
        spares = (both,)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend_all, (
                gl.constexpr(0), q_ring, k_ring, v_ring, released, spares, outputs, parts,
                sinks_ptr, scale_log2, form, DEPENDENT,
            )),
            (attend_all, (
                gl.constexpr(1), q_ring, k_ring, v_ring, released, spares, outputs, parts,
                sinks_ptr, scale_log2, form, DEPENDENT,
            )),
            (copy_all, (
                q_ring, k_ring, v_ring, released, cleared, ticket_ptr, queries, new_k, new_v,
                k_cache, v_cache, block_tables_ptr, seq_lens_ptr, query_start_ptr, is_ready_ptr,
                parts, table_stride, num_requests, min_queries, num_shares, form, DEPENDENT,
            )),
        ],
        [4, 1],
        [COMPUTING_REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip


def hopper_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    tickets: torch.Tensor,
    tiles: AttentionTiles,
    *,
    output_scale: torch.Tensor | None,
    min_queries: int,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    scale: float,
    part: int = 0,
    is_ready: torch.Tensor | None = None,
) -> None:
    """Runs prefill_attention with the tiles of hopper_tiles.

    There is one program per multiprocessor, as one fills its registers and shared memory; programs
    draw `tickets` for work, int32 of which the first is 0 before and after. Rows of k and v start
    at a multiple of 16 bytes. part: keys by position that have a softmax of their own, a multiple
    of the tiles' keys, or 0 for one softmax. is_ready: [R] int32, 0 for requests to skip. Other
    arguments are as in prefill_attention.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = cache.k.shape[1:3]
    group = num_heads // num_kv_heads
    heads = rows_of_token(group)
    most_tiles = num_tokens // (tiles.rows // heads) + metadata.seq_lens.shape[0]
    queries = q if is_packed(group) else _described(q, [ROWS.value // heads, heads, head_dim])
    new_k, new_v = (_described(x.flatten(1), [tiles.keys, head_dim]) for x in (k, v))
    piece = [min(block_size, tiles.keys), CHUNK_DIMS.value]
    k_cache, v_cache = (_described(x.flatten(2).flatten(0, 1), piece) for x in (cache.k, cache.v))
    launch = _launcher(
        num_kv_heads, group, block_size, tiles, sliding_window or 0, sinks is not None, part,
        is_ready is not None, q.device,
    )  # fmt: skip
    num_programs = num_multiprocessors(q.device)
    shared = None
    if part == 0:
        shared = share_tiles(
            metadata, num_tokens=num_tokens, num_kv_heads=num_kv_heads, rows_of_token=heads,
            num_programs=num_programs, head_dim=head_dim,
        )  # fmt: skip
    if shared is None or shared.num_shares == 0:
        num_programs = min(num_programs, most_tiles * num_kv_heads)
    launch(
        (num_programs, 1, 1),
        queries, new_k, new_v, k_cache, v_cache, output, output_scale, tickets,
        metadata.block_tables, metadata.seq_lens, metadata.query_start_loc,
        q if sinks is None else sinks, metadata.seq_lens if is_ready is None else is_ready,
        parts_of(shared),
        metadata.block_tables.stride(0), metadata.seq_lens.shape[0], min_queries,
        None if shared is None else shared.num_shares,
        0 if output_scale is None else output_scale.stride(1), scale * LOG2_E,
    )  # fmt: skip
    if shared is not None:
        add_parts(q, output, shared, output_scale=output_scale, num_kv_heads=num_kv_heads)


def _described(x: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """Describes a tensor to the copy engine, which loads boxes of it."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, _layout(x.dim()))


@lru_cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@lru_cache
def _launcher(
    num_kv_heads: int,
    group: int,
    block_size: int,
    tiles: AttentionTiles,
    window: int,
    has_sinks: bool,
    part: int,
    has_ready: bool,
    device: torch.device,
) -> Launch:
    form = HopperForm(
        num_kv_heads=num_kv_heads, group=group, block_size=block_size, window=window,
        stages=tiles.num_stages, has_sinks=has_sinks, part=part, has_ready=has_ready,
    )  # fmt: skip
    options = launch_options(device)
    return Launch(_hopper_attention_kernel, form=form, num_warps=tiles.num_warps, **options)
