"""Attention to paged latent vectors; all heads of a token read the same keys."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kernels.attention.configurations import (
    LEAST_DEALT_REQUESTS,
    MANY_LATENT_TOKENS,
    MAX_LATENT_PARTIALS,
)
from models.kernels.attention.key_parts import Parts, add_part, deal_keys
from models.kernels.attention.latent.latents_of_8_bits import attend_latents_of_8_bits
from models.kernels.attention.request_search import request_of
from models.kernels.gpu import gpu_of
from models.kernels.tuning.tiles import MAX_SPLITS
from models.kv_cache import LatentCacheData
from models.operands.base_two import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)

_METADATA = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "num_splits", "num_chosen",
]  # fmt: skip  # specialising on these would compile again while serving

ENTRY_ALIGNMENT = 16
"""Bytes that each part of a token's cache entry is a multiple of."""

MOST_TOKENS = 2**16 - 1
"""Most programs along the last dimension of a grid (CUDA C++ Programming Guide, "Compute
Capabilities")."""

_NUM_DEALT = MAX_LATENT_PARTIALS // 2
"""Programs of some heads that share the second and later parts of all sequences: see deal_keys."""

_LEAST_PART = 256
"""Fewest keys of such a part that is not the last one."""

_STAGES = {True: 5, False: 2}
"""Pipeline stages with 16 heads per program and with more.

Block ids are read first, which takes stages: 5 keep two tiles of keys loading, 2 keep one.
"""


class LatentCache(NamedTuple):
    """Tensors of LatentCacheData; in a kernel these are pointers. `scale` may be None."""

    latent: Any
    scale: Any
    rotated: Any


class LatentForm(NamedTuple):
    """All that a build of a kernel of the absorbed form is made for.

    num_heads: query heads. latent, rotated: elements of the parts of an entry.
    block_size: slots of a block.
    has_scales: latent vectors have 8 bits and scales.
    is_sparse: a query attends to the keys that it chose.
    heads, keys: of a tile; stages: of the pipeline.
    block_c, block_p: powers of two that hold the parts of an entry.
    is_split: another kernel adds up the parts of every token.
    dealt, least_part: programs that second and later parts are dealt to, 0 for equal parts, and the
        fewest keys of such a part: deal_keys.
    """

    num_heads: int
    latent: int
    rotated: int
    block_size: int
    has_scales: bool
    is_sparse: bool
    heads: int
    keys: int
    stages: int
    block_c: int
    block_p: int
    is_split: bool = False
    dealt: int = 0
    least_part: int = 0


@triton.jit
def attend_latents(
    q_latent, q_rotated, cache, table_ptr, chosen_ptr, start, end, num_keys, scale_log2,
    form: tl.constexpr,
):  # fmt: skip
    """Returns the weighted sums of latent vectors, highest scores and sums of exponentials."""
    columns = tl.arange(0, form.block_c)
    rotated = tl.arange(0, form.block_p)
    is_column = columns < form.latent
    is_rotated = rotated < form.rotated
    highest = tl.full([form.heads], float("-inf"), tl.float32)
    total = tl.full([form.heads], 0.0, tl.float32)
    acc = tl.full([form.heads, form.block_c], 0.0, tl.float32)
    for first in tl.range(start, end, form.keys, num_stages=form.stages):
        keys = first + tl.arange(0, form.keys)
        is_key = keys < end
        if form.is_sparse:
            keys = tl.load(chosen_ptr + keys, mask=is_key, other=0)
            is_key = is_key & (keys < num_keys)
        block = tl.load(table_ptr + keys // form.block_size, mask=is_key, other=0).to(tl.int64)
        slots = block * form.block_size + keys % form.block_size
        latent = tl.load(
            cache.latent + slots[:, None] * form.latent + columns[None, :],
            mask=is_key[:, None] & is_column[None, :],
            other=0.0,
        )
        k_rotated = tl.load(
            cache.rotated + slots[:, None] * form.rotated + rotated[None, :],
            mask=is_key[:, None] & is_rotated[None, :],
            other=0.0,
        )
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(k_rotated), scores, input_precision="ieee")
        scores = tl.where(is_key[None, :], scores * scale_log2, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        if form.is_sparse:
            # A row may see no key of a tile; a finite number avoids inf - inf.
            new_highest = tl.maximum(new_highest, -1e30)
        weights = tl.exp2(scores - new_highest[:, None])
        kept = tl.exp2(highest - new_highest)
        total = total * kept + tl.sum(weights, 1)
        acc = acc * kept[:, None]
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
        highest = new_highest
    return acc, highest, total


@triton.jit
def _add_sinks(acc, highest, total, sinks_ptr, heads, is_head, split):
    """Adds each head's sink, a score without a key, to the sums of a token's first part."""
    sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
    sinks = tl.where(split == 0, sinks, float("-inf"))
    # Finite, as a later part may have no key and inf - inf is NaN.
    new_highest = tl.maximum(tl.maximum(highest, sinks), -1e30)
    kept = tl.exp2(highest - new_highest)
    return acc * kept[:, None], new_highest, total * kept + tl.exp2(sinks - new_highest)


@triton.jit
def _find_part(seq_lens_ptr, query_start_ptr, num_requests, form: tl.constexpr):
    """Returns a program's token and request, and if dealt what deal_keys returns of its part."""
    token = tl.program_id(2)
    split = tl.program_id(1)
    part = 0
    active = 1
    num_before = 0
    if form.dealt > 0:
        dealt = token - (tl.num_programs(2) - form.dealt)
        place = num_requests + dealt
        if dealt < 0:
            place = request_of(token, query_start_ptr, num_requests)
        request, split, part, active, num_before = deal_keys(
            place, num_requests, seq_lens_ptr, query_start_ptr, 0, form.dealt, form.keys,
            form.least_part, False, False, False, False,
        )  # fmt: skip
        if dealt >= 0:
            token = tl.load(query_start_ptr + request)
    else:
        request = request_of(token, query_start_ptr, num_requests)
    return token, request, split, part, active, num_before


@triton.jit(do_not_specialize=_METADATA)
def _latent_kernel(
    q_ptr, cache, output_ptr, parts, block_tables_ptr, seq_lens_ptr, query_start_ptr, chosen_ptr,
    sinks_ptr, table_stride, num_requests, num_splits, num_chosen, scale_log2, form: tl.constexpr,
):  # fmt: skip
    """Attends some heads of one token to one part of its keys.

    Where parts are dealt, each result is stored here. With is_split another kernel adds up
    num_splits parts of every token. Without sinks_ptr heads have no sinks.
    """
    token, request, split, part, active, num_before = _find_part(
        seq_lens_ptr, query_start_ptr, num_requests, form
    )
    if form.dealt > 0 and split >= active:
        return
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    if token - query_start >= num_queries:
        return  # padding after the last request
    # A dummy request has no keys.
    num_keys = tl.load(seq_lens_ptr + request) - num_queries + token - query_start + 1
    num_places = num_keys
    if form.is_sparse:
        num_places = num_chosen
        chosen_ptr += token.to(tl.int64) * num_chosen
    if form.dealt == 0:
        part = tl.cdiv(tl.cdiv(num_places, num_splits), form.keys) * form.keys
    elif active == 1:
        part = num_places
    start = split * part
    end = tl.minimum(start + part, num_places)

    heads = tl.program_id(0) * form.heads + tl.arange(0, form.heads)
    is_head = heads < form.num_heads
    columns = tl.arange(0, form.block_c)
    rotated = tl.arange(0, form.block_p)
    is_column = columns < form.latent
    is_rotated = rotated < form.rotated
    SIZE: tl.constexpr = form.latent + form.rotated
    row = token.to(tl.int64) * form.num_heads + heads
    q_ptrs = q_ptr + row[:, None] * SIZE
    q_latent = tl.load(
        q_ptrs + columns[None, :], mask=is_head[:, None] & is_column[None, :], other=0.0
    )
    q_rotated = tl.load(
        q_ptrs + form.latent + rotated[None, :],
        mask=is_head[:, None] & is_rotated[None, :],
        other=0.0,
    )
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    if form.has_scales:
        acc, highest, total = attend_latents_of_8_bits(
            q_latent, q_rotated, cache, table_ptr, chosen_ptr, start, end, num_keys, scale_log2,
            form,
        )  # fmt: skip
    else:
        acc, highest, total = attend_latents(
            q_latent, q_rotated, cache, table_ptr, chosen_ptr, start, end, num_keys, scale_log2,
            form,
        )  # fmt: skip
    if sinks_ptr is not None:
        acc, highest, total = _add_sinks(acc, highest, total, sinks_ptr, heads, is_head, split)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    in_tile = is_head[:, None] & is_column[None, :]
    if form.is_split:
        row = (token.to(tl.int64) * num_splits + split) * form.num_heads + heads
        # A part without keys has the sum 0 and the logarithm minus infinity: it counts nothing.
        lse = tl.where(total > 0.0, highest + tl.log2(tl.maximum(total, 1e-30)), float("-inf"))
        tl.store(parts.lse + row, lse, mask=is_head)
        tl.store(parts.partials + row[:, None] * form.latent + columns[None, :], acc, mask=in_tile)
        return
    if form.dealt > 0 and active > 1:
        # Sequences of second and later parts have at most twice as many parts in all.
        partial = tl.program_id(0) * (2 * form.dealt) + num_before
        rows = tl.arange(0, form.heads)
        heads_of_token = token.to(tl.int64) * (form.num_heads // form.heads) + tl.program_id(0)
        add_part(
            acc, highest, total, rows, rows < form.heads, in_tile, columns, parts, output_ptr, None,
            partial, partial, heads_of_token, 0, 0, split, active,
            form.heads, form.heads, form.latent, form.block_c, 1, tl.float32,
        )  # fmt: skip
        return
    at = row[:, None] * form.latent + columns[None, :]
    tl.store(output_ptr + at, acc.to(output_ptr.dtype.element_ty), mask=in_tile)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    partials_ptr, lse_ptr, output_ptr, num_splits,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_C: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Stores the mean of one head's partial results, weighted by their sums of exponentials."""
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK_C)
    is_column = columns < LATENT
    splits = tl.arange(0, MAX_SPLITS)
    first = token * num_splits * NUM_HEADS + head
    all_lse = tl.load(
        lse_ptr + first + splits * NUM_HEADS, mask=splits < num_splits, other=float("-inf")
    )
    rows = first + splits[:, None] * NUM_HEADS
    in_parts = (splits < num_splits)[:, None] & is_column[None, :]
    partials = tl.load(partials_ptr + rows * LATENT + columns[None, :], mask=in_parts, other=0.0)
    weights = tl.exp2(all_lse - tl.maximum(tl.max(all_lse, 0), -1e30))
    total = tl.sum(weights, 0)
    acc = tl.sum(weights[:, None] * partials, 0) / tl.where(total > 0.0, total, 1.0)
    at = (token * NUM_HEADS + head) * LATENT + columns
    tl.store(output_ptr + at, acc.to(output_ptr.dtype.element_ty), mask=is_column)


def latent_attention(
    q: torch.Tensor,
    cache: LatentCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    scale: float,
    chosen: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    is_prefill: bool = True,
    is_invariant: bool = False,
) -> None:
    """Attends each query to its sequence's latent vectors up to its own, or to the chosen ones.

    In single-token steps and steps that verify drafts several programs share a sequence's keys, and
    so they do with single tokens beside few of chunks. Their results are added up in a fixed order.
    Grids depend on T, R, H and the kind of step only and the host reads nothing, so launches may be
    captured.
    T tokens, H heads, C and P as in models.ops.attention.latent_attention.

    q: [T, H, C + P], contiguous; the cache has this step's entries.
    output: [T, H, C], contiguous; a request without tokens gets zeros.
    scale: factor of the scores.
    chosen: [T, n] int32, positions of the tokens that each query attends to; None: all.
    sinks: [H], scores that join each head's softmax without a key; or None.
    is_prefill: whether a query of several tokens may be a prompt chunk.
    is_invariant: with chosen tokens, a row's bits depend on its sequence alone (one program each).

    Raises:
        ValueError: there are more than MOST_TOKENS, or a cache entry is not a multiple of 16 bytes;
            such rows were read from misaligned addresses (H200, Triton 3.6, 30 float32).
    """
    check_sizes(cache, len(q))
    num_tokens, num_heads, size = q.shape
    latent = output.shape[-1]
    is_float = q.dtype.itemsize > 2
    is_few = is_float or is_invariant or num_tokens < MANY_LATENT_TOKENS
    heads = 16
    if not is_few:
        most = _most_heads(triton.next_power_of_2(latent), size - latent, q.itemsize, q.device)
        heads = min(most, max(heads, triton.next_power_of_2(num_heads)))
    dealt = 0
    if num_heads % heads == 0 and chosen is None:
        dealt = _num_dealt(metadata, is_prefill=is_prefill)
    splits = 1
    if dealt == 0 and not is_invariant:
        splits = _num_splits(metadata, num_tokens, is_prefill=is_prefill)
    workspace = metadata.workspace
    # Kernels are built for alignments. Unlike other metadata this is aligned in steps of any size.
    stand_in = metadata.query_start_loc
    # Without parts the kernel touches none of these three.
    parts = (
        Parts(output, stand_in, stand_in)
        if workspace is None
        else Parts(workspace.partials, workspace.lse, workspace.counters)
    )
    has_scales = cache.latent_scale is not None
    # Products take 16 columns at least, and those of words of four elements are a quarter.
    block_c = max(64 if has_scales else 16, triton.next_power_of_2(latent))
    form = LatentForm(
        num_heads=num_heads, latent=latent, rotated=size - latent,
        block_size=cache.latent.shape[1], has_scales=has_scales, is_sparse=chosen is not None,
        heads=heads, keys=16 if is_float else 32, stages=1 if is_float else _STAGES[heads == 16],
        block_c=block_c, block_p=max(16, triton.next_power_of_2(size - latent)),
        is_split=splits > 1, dealt=dealt, least_part=_LEAST_PART,
    )  # fmt: skip
    _latent_kernel[(triton.cdiv(num_heads, heads), splits, num_tokens + dealt)](
        q, LatentCache(cache.latent, cache.latent_scale, cache.rotated), output, parts,
        metadata.block_tables, metadata.seq_lens, metadata.query_start_loc,
        stand_in if chosen is None else chosen, sinks,
        metadata.block_tables.stride(0), metadata.seq_lens.shape[0], splits,
        0 if chosen is None else chosen.shape[1], scale * LOG2_E,
        form=form, num_warps=4 if heads == 16 else 8,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(num_heads, num_tokens)](
            parts.partials, parts.lse, output, splits, NUM_HEADS=num_heads, LATENT=latent,
            BLOCK_C=block_c, MAX_SPLITS=MAX_SPLITS, num_warps=8,
        )  # fmt: skip


@lru_cache
def _most_heads(latent: int, rotated: int, itemsize: int, device: torch.device) -> int:
    """Returns the most heads of a program that fit into shared memory beside a tile of keys."""
    heads, keys, gpu = 64, 32, gpu_of(device)
    entry_bytes = (latent + triton.next_power_of_2(rotated)) * itemsize
    while heads > 16 and not gpu.fits((heads + keys) * entry_bytes + heads * keys * itemsize):
        heads //= 2
    return heads


def check_sizes(cache: LatentCacheData, num_tokens: int) -> None:
    """Refuses sizes that no kernel takes; raises what latent_attention says."""
    if num_tokens > MOST_TOKENS:
        raise ValueError(
            f"latent attention has no kernel for steps of {num_tokens} tokens; the limit is "
            f"{MOST_TOKENS}: lower --max-num-batched-tokens"
        )
    for stored in (cache.latent, cache.rotated):
        if stored.shape[-1] * stored.itemsize % ENTRY_ALIGNMENT:
            raise ValueError(
                f"latent attention has no kernel for cache entries of {stored.shape[-1]} "
                f"{stored.dtype}; they must be multiples of {ENTRY_ALIGNMENT} bytes"
            )


def _num_splits(metadata: AttentionMetadata, num_tokens: int, *, is_prefill: bool) -> int:
    """Returns how many parts each sequence's keys are split into if parts are not dealt."""
    if metadata.workspace is None or (is_prefill and metadata.max_seqlen_q > 1):
        return 1
    return max(1, min(MAX_SPLITS, MAX_LATENT_PARTIALS // num_tokens))


def _num_dealt(metadata: AttentionMetadata, *, is_prefill: bool) -> int:
    """Returns how many programs share the later parts of single tokens' keys: see num_dealt."""
    is_small = metadata.seq_lens.shape[0] < LEAST_DEALT_REQUESTS
    verifies = metadata.max_seqlen_q > 1 and not is_prefill
    return 0 if metadata.workspace is None or is_small or verifies else _NUM_DEALT
