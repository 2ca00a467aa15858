"""Paged attention of single-token queries, the keys of a sequence split over several programs."""

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata, KVCacheData
from models.ops.triton.configurations import MAX_SPLITS, decode_tiles, num_splits
from models.ops.triton.online_softmax import attend_keys

_METADATA = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_splits",
]  # fmt: skip  # specialising on these would compile again while serving


@triton.jit
def _combine(
    partials_ptr, lse_ptr, output_ptr, active,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Stores the mean of `active` partial results, weighted by their sums of exponentials.

    .cg reads past the first-level cache, which may hold what was there before other programs wrote.
    """
    rows = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, BLOCK_D)
    in_rows = rows < GROUP
    in_tile = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    at_tile = rows[:, None] * HEAD_DIM + dims[None, :]
    splits = tl.arange(0, MAX_SPLITS)
    all_lse = tl.load(
        lse_ptr + splits[:, None] * GROUP + rows[None, :],
        mask=(splits < active)[:, None] & in_rows[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    # A padding row has no partial result; zero keeps its difference from being inf - inf.
    highest = tl.where(in_rows, tl.max(all_lse, 0), 0.0)
    total = tl.sum(tl.exp2(all_lse - highest[None, :]), 0)
    acc = tl.zeros([PADDED_GROUP, BLOCK_D], tl.float32)
    for first in range(0, active, UNROLL):
        # Unrolled, so that the reads of many parts are under way at once.
        for offset in tl.static_range(UNROLL):
            split = first + offset
            is_active = split < active
            lse = tl.load(
                lse_ptr + split * GROUP + rows,
                mask=in_rows & is_active,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            partial = tl.load(
                partials_ptr + split * GROUP * HEAD_DIM + at_tile,
                mask=in_tile & is_active,
                other=0.0,
                cache_modifier=".cg",
            )
            acc += tl.exp2(lse - highest)[:, None] * partial
    acc = acc / tl.where(in_rows, total, 1.0)[:, None]
    tl.store(output_ptr + at_tile, acc.to(output_ptr.dtype.element_ty), mask=in_tile)


@triton.jit(do_not_specialize=_METADATA)
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, output_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr,
    partials_ptr, lse_ptr, counters_ptr, table_stride, num_splits, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ONLY_SINGLE_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    PADDED_GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attends the GROUP query heads of one kv head of one request to one part of its keys."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    token = request
    if not ONLY_SINGLE_TOKENS:
        token = tl.load(query_start_ptr + request).to(tl.int64)
        if tl.load(query_start_ptr + request + 1) - token != 1:
            return
    seq_len = tl.load(seq_lens_ptr + request)
    # Equal parts of whole tiles; short sequences have fewer parts than there are programs.
    part = tl.cdiv(tl.cdiv(tl.maximum(seq_len, 1), num_splits), KEYS) * KEYS
    active = tl.cdiv(tl.maximum(seq_len, 1), part)
    if split >= active:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    in_rows = rows < GROUP
    in_tile = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (token * NUM_KV_HEADS + kv_head) * GROUP + rows
    at_heads = heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + at_heads, mask=in_tile, other=0.0)
    table_ptr = block_tables_ptr + request * table_stride
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    end = tl.minimum((split + 1) * part, seq_len)
    acc, highest, total = attend_keys(
        q, acc, highest, total, split * part, end, tl.zeros([ROWS], tl.int32) + seq_len, table_ptr,
        k_ptr, v_ptr, kv_head, dims, scale_log2,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, True, STAGES,
    )  # fmt: skip
    # A dummy request has no keys; its output is zero.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]

    if active == 1:
        tl.store(output_ptr + at_heads, acc.to(output_ptr.dtype.element_ty), mask=in_tile)
    else:
        pair = request * NUM_KV_HEADS + kv_head
        partials_ptr += pair * num_splits * GROUP * HEAD_DIM
        lse_ptr += pair * num_splits * GROUP
        at_partial = (split * GROUP + rows)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partials_ptr + at_partial, acc, mask=in_tile)
        tl.store(lse_ptr + split * GROUP + rows, highest + tl.log2(total), mask=in_rows)
        # All threads' stores come before the arrival that shows them to the last program.
        tl.debug_barrier()
        num_arrived = tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel")
        if num_arrived == active - 1:
            tl.store(counters_ptr + pair, 0)
            _combine(
                partials_ptr, lse_ptr,
                output_ptr + (token * NUM_KV_HEADS + kv_head) * GROUP * HEAD_DIM, active,
                GROUP, PADDED_GROUP, HEAD_DIM, BLOCK_D, MAX_SPLITS, 16,
            )  # fmt: skip


def decode_attention(
    q: torch.Tensor, cache: KVCacheData, metadata: AttentionMetadata, output: torch.Tensor
) -> None:
    """Attends each single-token request's query to all its keys; other requests are left alone.

    T tokens, R requests, Hq/Hk query/kv heads, D head dim. Keys are split over up to MAX_SPLITS
    programs if metadata has a workspace; the last one of a sequence to finish adds the partial
    results up, in a fixed order. The grid depends on R, Hq, Hk and the workspace only, and nothing
    is read on the host, so that a launch may be captured and replayed.

    Args:
        q: [T, Hq, D], contiguous; may be `output`.
        cache: the layer's keys and values.
        metadata: the step's, on the GPU.
        output: [T, Hq, D], contiguous; a request without tokens gets zeros.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    num_requests = metadata.seq_lens.shape[0]
    group = num_heads // num_kv_heads
    workspace = metadata.workspace
    splits = num_splits(workspace, num_requests, num_heads, num_kv_heads)
    padded_group = triton.next_power_of_2(group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    tiles = decode_tiles(q.dtype, block_d)
    # Unsplit, the kernel touches none of these three.
    partials, lse, counters = (
        (output, output, metadata.seq_lens)
        if workspace is None
        else (workspace.partials, workspace.lse, workspace.counters)
    )
    _decode_kernel[(num_kv_heads, splits, num_requests)](
        q, cache.k, cache.v, output, metadata.block_tables, metadata.seq_lens,
        metadata.query_start_loc, partials, lse, counters,
        metadata.block_tables.stride(0), splits, head_dim**-0.5 * 1.4426950408889634,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.k.shape[1], ONLY_SINGLE_TOKENS=metadata.max_seqlen_q == 1,
        MAX_SPLITS=MAX_SPLITS, PADDED_GROUP=padded_group, ROWS=max(tiles.rows, padded_group),
        KEYS=tiles.keys, BLOCK_D=block_d, STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
