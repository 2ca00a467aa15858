"""Copies of an 8-bit cache's keys and values in 16 bits, for chunks after cached tokens.

hopper_attention multiplies keys as the copy engine leaves them in shared memory. Each key of a
chunk's sequence is converted once, not once for each tile of queries.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kernels.attention.cache.cache_tensors import cache_tensors
from models.kernels.attention.chunk_start import chunk_start
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kv_cache import KVCacheData

_MOST_BYTES = 2**28
"""Memory of the copies: 65,536 tokens with 8 kv heads of 128."""

_PROGRAMS = 1024
"""Programs that share the blocks of all requests."""

_SEEN_AT_ONCE = tl.constexpr(256)
"""Requests that a program reads together."""
_ROWS = tl.constexpr(32)
"""Heads of keys that a program converts together."""

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "wide_table_stride",
    "num_requests", "num_wide_blocks", "min_queries",
]  # fmt: skip  # specialising on these would compile again while serving


@dataclass(frozen=True, slots=True, kw_only=True)
class WidenedCache:
    """Keys and values of later chunks' sequences.

    cache: blocks in 16 bits. metadata: the step's, with the tables of these blocks.
    is_ready: [R] int32, 0 for a later chunk whose keys found no room and for requests of fewer
        tokens than min_queries.
    is_lacking: [1] int32, whether a later chunk's keys found no room.
    num_blocks: the room.
    """

    cache: KVCacheData
    metadata: AttentionMetadata
    is_ready: torch.Tensor
    is_lacking: torch.Tensor
    num_blocks: int


@triton.jit
def _blocks_of(
    requests, is_request, seq_lens_ptr, query_start_ptr, min_queries,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Returns how many blocks to copy for each request, the first one, and who brings a chunk."""
    starts = tl.load(query_start_ptr + requests, mask=is_request, other=0)
    num_queries = tl.load(query_start_ptr + requests + 1, mask=is_request, other=0) - starts
    seq_lens = tl.load(seq_lens_ptr + requests, mask=is_request, other=0)
    first = tl.zeros_like(seq_lens)
    if WINDOW > 0:
        # Queries read whole tiles of keys.
        first = tl.maximum(seq_lens - num_queries + 1 - WINDOW, 0) // KEYS * KEYS // BLOCK_SIZE
    elif WINDOW < 0:
        first = chunk_start(seq_lens - num_queries, WINDOW) // KEYS * KEYS // BLOCK_SIZE
    is_chunk = num_queries >= min_queries
    is_later = is_chunk & (seq_lens > num_queries)
    return tl.where(is_later, tl.cdiv(seq_lens, BLOCK_SIZE) - first, 0), first, is_chunk


@triton.jit
def _copy_block(
    wide_ptr, stored_ptr, scale_ptr, wide_block, block, NUM_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, HEAD_DIM)
    for first in range(0, NUM_ROWS, _ROWS):
        rows = first + tl.arange(0, _ROWS)
        in_block = rows < NUM_ROWS
        at_rows = (block * NUM_ROWS + rows)[:, None] * HEAD_DIM + dims[None, :]
        stored = tl.load(stored_ptr + at_rows, mask=in_block[:, None], other=0.0)
        scale = tl.load(scale_ptr + block * NUM_ROWS + rows, mask=in_block, other=0.0)
        wide = stored.to(tl.float32) * scale[:, None]
        at_rows = (wide_block * NUM_ROWS + rows)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(wide_ptr + at_rows, wide.to(wide_ptr.dtype.element_ty), mask=in_block[:, None])


@triton.jit(do_not_specialize=_VARYING)
def _widen_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, wide_k_ptr, wide_v_ptr, wide_tables_ptr, is_ready_ptr,
    is_lacking_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr, table_stride,
    wide_table_stride, num_requests, num_wide_blocks, min_queries,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copies every num_programs(0)-th of all requests' blocks, and writes their tables.

    The copies of a request follow those of the requests before it. The number of programs does not
    depend on that of requests: those of a recorded step are mostly absent.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    program = tl.program_id(0)
    NUM_ROWS: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    num_before = 0
    for first in range(0, num_requests, _SEEN_AT_ONCE):
        each = tl.arange(0, _SEEN_AT_ONCE)
        requests = first + each
        is_request = requests < num_requests
        counts, first_blocks, is_chunk = _blocks_of(
            requests, is_request, seq_lens_ptr, query_start_ptr, min_queries,
            BLOCK_SIZE, KEYS, WINDOW,
        )  # fmt: skip
        ends = num_before + tl.cumsum(counts, 0)
        if program == first // _SEEN_AT_ONCE:
            is_ready = is_chunk & ((counts == 0) | (ends <= num_wide_blocks))
            tl.store(is_ready_ptr + requests, is_ready, mask=is_request)
        num_programs = tl.num_programs(0)
        num_rounds = tl.cdiv(tl.maximum(num_before - program, 0), num_programs)
        num_before += tl.sum(counts, 0)
        last = tl.minimum(num_before, num_wide_blocks)
        for wide_block in range(program + num_rounds * num_programs, last, num_programs):
            place = tl.sum((ends <= wide_block).to(tl.int32), 0)
            is_owner = each == place
            if tl.sum(tl.where(is_owner, ends, 0), 0) <= num_wide_blocks:
                i = wide_block - tl.sum(tl.where(is_owner, ends - counts, 0), 0)
                i += tl.sum(tl.where(is_owner, first_blocks, 0), 0)
                request = tl.cast(first + place, tl.int64)
                block = tl.load(block_tables_ptr + request * table_stride + i).to(tl.int64)
                tl.store(wide_tables_ptr + request * wide_table_stride + i, wide_block)
                wide = tl.cast(wide_block, tl.int64)
                _copy_block(wide_k_ptr, k_ptr, k_scale_ptr, wide, block, NUM_ROWS, HEAD_DIM)
                _copy_block(wide_v_ptr, v_ptr, v_scale_ptr, wide, block, NUM_ROWS, HEAD_DIM)
    if program == 0:
        tl.store(is_lacking_ptr, (num_before > num_wide_blocks).to(tl.int32))


def widen(
    cache: KVCacheData,
    metadata: AttentionMetadata,
    dtype: torch.dtype,
    *,
    keys: int,
    min_queries: int,
    sliding_window: int | None,
) -> WidenedCache:
    """Copies what chunks after cached tokens attend to, as far as there is room.

    The grid does not change and the host reads nothing, so a launch may be captured. The heads'
    dimension is a power of two.

    keys: of a tile of the kernel that reads the copies. min_queries: skips requests with fewer
    query tokens. sliding_window: most keys that a query sees.
    """
    _, block_size, num_kv_heads, head_dim = cache.k.shape
    num_requests, width = metadata.block_tables.shape
    block_bytes = 2 * block_size * num_kv_heads * head_dim * dtype.itemsize
    # Of the most that any step needs, so that a measured step needs as much.
    num_blocks = max(1, min(_MOST_BYTES // block_bytes, num_requests * width))
    wide = cache.k.new_empty(2, num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype)
    tables = torch.empty_like(metadata.block_tables)
    is_ready = torch.empty_like(metadata.seq_lens)
    is_lacking = is_ready.new_empty(1)
    launch = _launcher(
        num_kv_heads, head_dim, block_size, keys, sliding_window or 0, cache.k.device
    )
    launch(
        (_PROGRAMS, 1, 1),
        *cache_tensors(cache), wide[0], wide[1], tables, is_ready, is_lacking,
        metadata.block_tables, metadata.seq_lens, metadata.query_start_loc,
        metadata.block_tables.stride(0), tables.stride(0), num_requests, num_blocks, min_queries,
    )  # fmt: skip
    return WidenedCache(
        cache=KVCacheData(k=wide[0], v=wide[1]),
        metadata=replace(metadata, block_tables=tables),
        is_ready=is_ready,
        is_lacking=is_lacking,
        num_blocks=num_blocks,
    )


def all_fit(
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


@lru_cache
def _launcher(
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    keys: int,
    window: int,
    device: torch.device,
) -> Launch:
    return Launch(
        _widen_kernel, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        KEYS=keys, WINDOW=window, num_warps=4, **launch_options(device),
    )  # fmt: skip
