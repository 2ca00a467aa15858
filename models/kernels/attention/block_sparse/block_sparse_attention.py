"""Attention to chosen blocks of paged keys; the query heads of a kv head read the same ones.

A query sees few keys wherever it is, so a prompt's tokens run as single ones.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kernels.attention.attention import attend as attend_all
from models.kernels.attention.block_sparse.block_choice import choose_blocks
from models.kernels.attention.cache.cache_tensors import cache_tensors
from models.kernels.attention.cache.rotate_and_cache import rotate_and_cache
from models.kernels.attention.latent.latent_attention import (
    ENTRY_ALIGNMENT,
    MOST_TOKENS,
    combine_kernel,
)
from models.kernels.attention.online_softmax import fold_tile, widened
from models.kernels.attention.request_search import request_of
from models.kernels.gpu import gpu_of
from models.kernels.tuning.tiles import MAX_SPLITS
from models.kv_cache import KVCacheData
from models.operands.base_two import LOG2_E
from models.operands.block_index import BlockIndex

_METADATA = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "num_splits",
]  # fmt: skip
_PROGRAMS = 264
"""Programs that a few tokens' keys are split among: two for each multiprocessor of an H200."""
_FEWEST_WHOLE = 128
"""Tokens from which on keys are not split, whatever the heads: dummy steps have as many."""
_STAGES = 2
"""Pipeline stages of 16-bit queries; those of float32 leave no room for a second."""


class AttentionForm(NamedTuple):
    """All that a build is made for.

    num_kv_heads, group: kv heads, and query heads of each. head_dim: elements of a head.
    block_d: a power of two that holds one. block_size: slots of a block of the cache.
    block_tokens, top_blocks: of BlockIndex.
    has_scales: the cache has 8 bits and scales.
    rows: query heads of a program. keys: of a tile. stages: of the pipeline.
    is_split: another kernel adds up the parts of every token.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_d: int
    block_size: int
    block_tokens: int
    top_blocks: int
    has_scales: bool
    rows: int
    keys: int
    stages: int
    is_split: bool


@triton.jit
def _attend_blocks(
    q, cache, chosen_ptr, table_ptr, kv_head, start, end, num_keys, scale_log2, form: tl.constexpr
):
    """Attends rows to the keys from place start to end among those of the chosen blocks.

    num_keys: of the sequence up to the query; later ones are not seen.

    Returns:
        Weighted values, highest scores and sums of exponentials.
    """
    dims = tl.arange(0, form.block_d)
    in_head = (dims < form.head_dim)[None, :]
    positions = tl.full([form.rows], 0, tl.int32) + num_keys - 1
    # Highest scores are finite, as inf - inf is NaN.
    highest = tl.full([form.rows], -1e30, tl.float32)
    total = tl.full([form.rows], 0.0, tl.float32)
    acc = tl.full([form.rows, form.block_d], 0.0, tl.float32)
    for first in tl.range(start, end, form.keys, num_stages=form.stages):
        places = first + tl.arange(0, form.keys)
        is_key = places < end
        number = tl.load(chosen_ptr + places // form.block_tokens, mask=is_key, other=0)
        keys = number * form.block_tokens + places % form.block_tokens
        is_key = is_key & (keys < num_keys)
        keys = tl.where(is_key, keys, num_keys)
        block = tl.load(table_ptr + keys // form.block_size, mask=is_key, other=0).to(tl.int64)
        slots = (block * form.block_size + keys % form.block_size) * form.num_kv_heads + kv_head
        at = slots[:, None] * form.head_dim + dims[None, :]
        in_tile = is_key[:, None] & in_head
        k = tl.load(cache.k + at, mask=in_tile, other=0.0)
        v = tl.load(cache.v + at, mask=in_tile, other=0.0)
        k_scale, v_scale = 1.0, 1.0
        if form.has_scales:
            k, v = widened(k, q.dtype), widened(v, q.dtype)
            k_scale = tl.load(cache.k_scale + slots, mask=is_key, other=0.0)[None, :]
            v_scale = tl.load(cache.v_scale + slots, mask=is_key, other=0.0)[None, :]
        acc, highest, total = fold_tile(
            q, k, v, k_scale, v_scale, acc, highest, total, keys, num_keys, positions, scale_log2,
            True, 0, form.has_scales,
        )  # fmt: skip
    return acc, highest, total


@triton.jit(do_not_specialize=_METADATA)
def _block_sparse_kernel(
    q_ptr, cache, chosen_ptr, output_ptr, partials_ptr, lse_ptr, block_tables_ptr, seq_lens_ptr,
    query_start_ptr, table_stride, num_requests, num_splits, scale_log2, form: tl.constexpr,
):  # fmt: skip
    """Attends some query heads of a kv head and token to one part of the chosen keys."""
    split = tl.program_id(1)
    token = tl.program_id(2)
    request = request_of(token, query_start_ptr, num_requests)
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    if token - query_start >= num_queries:
        return  # padding after the last request
    # A dummy request has no keys.
    num_keys = tl.load(seq_lens_ptr + request) - num_queries + token - query_start + 1
    PROGRAMS: tl.constexpr = (form.group + form.rows - 1) // form.rows
    kv_head = tl.program_id(0) // PROGRAMS
    of_group = tl.program_id(0) % PROGRAMS * form.rows + tl.arange(0, form.rows)
    NUM_PLACES: tl.constexpr = form.top_blocks * form.block_tokens
    part = tl.cdiv(tl.cdiv(NUM_PLACES, num_splits), form.keys) * form.keys
    start = split * part
    end = tl.minimum(start + part, NUM_PLACES)

    NUM_HEADS: tl.constexpr = form.num_kv_heads * form.group
    heads = kv_head * form.group + of_group
    dims = tl.arange(0, form.block_d)
    is_head = of_group < form.group
    in_tile = is_head[:, None] & (dims < form.head_dim)[None, :]
    at = (token.to(tl.int64) * NUM_HEADS + heads)[:, None] * form.head_dim + dims[None, :]
    q = tl.load(q_ptr + at, mask=in_tile, other=0.0)
    chosen_ptr += (token.to(tl.int64) * form.num_kv_heads + kv_head) * form.top_blocks
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    acc, highest, total = _attend_blocks(
        q, cache, chosen_ptr, table_ptr, kv_head, start, end, num_keys, scale_log2, form
    )
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if form.is_split:
        row = (token.to(tl.int64) * num_splits + split) * NUM_HEADS + heads
        # A part without keys counts nothing.
        lse = tl.where(total > 0.0, highest + tl.log2(tl.maximum(total, 1e-30)), float("-inf"))
        tl.store(lse_ptr + row, lse, mask=is_head)
        at_parts = partials_ptr + row[:, None] * form.head_dim + dims[None, :]
        tl.store(at_parts, acc, mask=in_tile)
    else:
        tl.store(output_ptr + at, acc.to(output_ptr.dtype.element_ty), mask=in_tile)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    index: BlockIndex,
    scale: float,
    *,
    is_invariant: bool = False,
) -> None:
    """Runs models.ops.attention.block_sparse_attention on a GPU, after the index's keys are stored.

    Grids depend on sizes alone and the host reads nothing, so launches may be captured. Results of
    parts are added up in a fixed order. Where every block that there is can be chosen, the kernels
    of models.kernels.attention.attention run.

    In batch-invariant mode (is_invariant) they do not, and one program attends to all keys, in the
    order of their blocks: the bits of a row depend on its sequence alone.

    q, output: [T, Hq, D], contiguous. k, v: [T, Hk, D]. Others as in the operator.

    Raises:
        ValueError: no kernel takes the sizes.
    """
    assert cache.index_keys is not None, "an index caches its keys"
    _check_sizes(cache, len(q))
    chosen = choose_blocks(index, cache.index_keys, metadata, is_invariant=is_invariant)
    if chosen is None:
        attend_all(q, k, v, output, cache, metadata, None, None, None, scale, 0.0)
        return
    rotate_and_cache(q, k, v, q, None, cache, metadata.slot_mapping, None)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    group, block_d = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    rows = min(64, max(16, triton.next_power_of_2(group)))
    programs = num_kv_heads * triton.cdiv(group, rows)
    splits = 1
    if num_tokens < _FEWEST_WHOLE and not is_invariant:
        splits = max(1, min(MAX_SPLITS, _PROGRAMS // (num_tokens * programs)))
    num_rows = num_tokens * splits if splits > 1 else 0
    partials = torch.empty(num_rows, num_heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q.device)
    keys, stages = _tile(block_d, q.itemsize, q.device)
    form = AttentionForm(
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_d=block_d,
        block_size=cache.k.shape[1], block_tokens=index.block_size, top_blocks=index.top_blocks,
        has_scales=cache.k_scale is not None, rows=rows, keys=keys, stages=stages,
        is_split=splits > 1,
    )  # fmt: skip
    _block_sparse_kernel[(programs, splits, num_tokens)](
        q, cache_tensors(cache), chosen, output, partials, lse, metadata.block_tables,
        metadata.seq_lens, metadata.query_start_loc, metadata.block_tables.stride(0),
        metadata.seq_lens.shape[0], splits, scale * LOG2_E,
        form=form, num_warps=4 if rows == 16 else 8,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(num_heads, num_tokens)](
            partials, lse, output, splits, NUM_HEADS=num_heads, LATENT=head_dim, BLOCK_C=block_d,
            MAX_SPLITS=MAX_SPLITS, num_warps=8,
        )  # fmt: skip


@lru_cache
def _tile(block_d: int, itemsize: int, device: torch.device) -> tuple[int, int]:
    """Returns the keys of a tile and the stages of the pipeline that shared memory has room for."""
    if itemsize > 2:
        return 16, 1
    keys, gpu = 64, gpu_of(device)
    while keys > 16 and not gpu.fits(2 * _STAGES * keys * block_d * itemsize):
        keys //= 2
    return keys, _STAGES


def _check_sizes(cache: KVCacheData, num_tokens: int) -> None:
    """Refuses sizes that no kernel takes; raises what `attend` says."""
    if num_tokens > MOST_TOKENS:
        raise ValueError(
            f"attention to chosen blocks has no kernel for steps of {num_tokens} tokens; the limit "
            f"is {MOST_TOKENS}: lower --max-num-batched-tokens"
        )
    for stored in (cache.k, cache.index_keys):
        if stored is not None and stored.shape[-1] * stored.itemsize % ENTRY_ALIGNMENT:
            raise ValueError(
                f"attention to chosen blocks has no kernel for heads of {stored.shape[-1]} "
                f"{stored.dtype}; they must be multiples of {ENTRY_ALIGNMENT} bytes"
            )
