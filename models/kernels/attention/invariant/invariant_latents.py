"""Latent attention of batch-invariant mode: the absorbed form, for any number of queries.

The keys of a sequence are cut in parts of PART keys by position, as in invariant_parts. One program
attends some heads of a token to all parts, or one program attends them to each part and a second
kernel merges these; both merge in the order of positions, so the bits are the same. Where an index
chooses tokens, one program attends some heads to all of them in the order of positions.
"""

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata, IndexChoice
from models.kernels.attention.configurations import MAX_LATENT_PARTIALS, PART
from models.kernels.attention.invariant.invariant_parts import merge
from models.kernels.attention.latent.index_choice import choose_keys
from models.kernels.attention.latent.latent_attention import (
    LatentCache,
    LatentForm,
    attend_latents,
    check_sizes,
    latent_attention,
)
from models.kernels.attention.latent.latent_cache import cache_latents
from models.kernels.attention.latent.latents_of_8_bits import attend_latents_of_8_bits
from models.kernels.attention.request_search import request_of
from models.kernels.products.head_linear import head_linear
from models.kernels.tuning.tiles import MAX_SPLITS
from models.kv_cache import LatentCacheData
from models.operands.base_two import LOG2_E
from models.operands.index_queries import IndexQueries
from models.operands.latent_entries import LatentEntries
from models.operands.latent_queries import LatentQueries

_HEADS = 16
"""Heads of a program: with more, tensor cores would take other instructions."""
_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "num_splits", "most_partials",
]  # fmt: skip  # specialising on these would compile again while serving


@triton.jit
def _parts_of(token, seq_lens_ptr, query_start_ptr, num_requests, num_splits, PART: tl.constexpr):
    """Returns a token's request, its keys, their parts, and whether programs share them.

    Tokens after the last request, and those of a dummy request, have no keys.
    """
    request = request_of(token, query_start_ptr, num_requests)
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    num_keys = tl.load(seq_lens_ptr + request) - num_queries + token - query_start + 1
    num_keys = tl.where(token - query_start < num_queries, tl.maximum(num_keys, 0), 0)
    num_parts = tl.cdiv(num_keys, PART)
    return request, num_keys, num_parts, (num_parts > 1) & (num_parts <= num_splits)


@triton.jit(do_not_specialize=_VARYING)
def _invariant_latent_kernel(
    q_ptr, cache, output_ptr, partials_ptr, sums_ptr, block_tables_ptr, seq_lens_ptr,
    query_start_ptr, table_stride, num_requests, num_splits, most_partials, scale_log2,
    PART: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Attends some heads of one token to one part of its keys or to all."""
    split = tl.program_id(1)
    token = tl.program_id(2)
    request, num_keys, num_parts, is_split = _parts_of(
        token, seq_lens_ptr, query_start_ptr, num_requests, num_splits, PART
    )
    if split >= tl.where(is_split, num_parts, 1):
        return
    heads = tl.program_id(0) * form.heads + tl.arange(0, form.heads)
    is_head = heads < form.num_heads
    columns = tl.arange(0, form.block_c)
    rotated = tl.arange(0, form.block_p)
    in_tile = is_head[:, None] & (columns < form.latent)[None, :]
    row = token.to(tl.int64) * form.num_heads + heads
    q_ptrs = q_ptr + row[:, None] * (form.latent + form.rotated)
    q_latent = tl.load(q_ptrs + columns[None, :], mask=in_tile, other=0.0)
    in_rotated = is_head[:, None] & (rotated < form.rotated)[None, :]
    q_rotated = tl.load(q_ptrs + form.latent + rotated[None, :], mask=in_rotated, other=0.0)
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    acc = tl.full([form.heads, form.block_c], 0.0, tl.float32)
    highest = tl.full([form.heads], -1e30, tl.float32)
    total = tl.full([form.heads], 0.0, tl.float32)
    at = (token.to(tl.int64) * num_splits + split) * form.num_heads + heads
    # As a loop, so that there is one piece of code for the parts of all programs.
    for part in range(split, tl.where(is_split, split + 1, num_parts)):
        start, end = part * PART, tl.minimum((part + 1) * PART, num_keys)
        if form.has_scales:
            part_acc, part_highest, part_total = attend_latents_of_8_bits(
                q_latent, q_rotated, cache, table_ptr, table_ptr, start, end, num_keys, scale_log2,
                form,
            )  # fmt: skip
        else:
            part_acc, part_highest, part_total = attend_latents(
                q_latent, q_rotated, cache, table_ptr, table_ptr, start, end, num_keys, scale_log2,
                form,
            )  # fmt: skip
        if is_split:
            at_partial = at[:, None] * form.latent + columns[None, :]
            tl.store(partials_ptr + at_partial, part_acc, mask=in_tile)
            tl.store(sums_ptr + at, part_highest, mask=is_head)
            tl.store(sums_ptr + most_partials + at, part_total, mask=is_head)
        else:
            acc, highest, total = merge(acc, highest, total, part_acc, part_highest, part_total)
    if not is_split:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        at_output = row[:, None] * form.latent + columns[None, :]
        tl.store(output_ptr + at_output, acc.to(output_ptr.dtype.element_ty), mask=in_tile)


@triton.jit(do_not_specialize=_VARYING)
def _merge_latents_kernel(
    partials_ptr, sums_ptr, output_ptr, seq_lens_ptr, query_start_ptr, num_requests, num_splits,
    most_partials,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, PART: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Merges the parts of one head of a token whose keys programs shared."""
    token = tl.program_id(1)
    _, _, num_parts, is_split = _parts_of(
        token, seq_lens_ptr, query_start_ptr, num_requests, num_splits, PART
    )
    if not is_split:
        return
    columns = tl.arange(0, BLOCK_C)
    in_row = (columns < LATENT)[None, :]
    one = tl.arange(0, 1)
    acc = tl.zeros([1, BLOCK_C], tl.float32)
    highest = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    for part in range(num_parts):
        at = (token.to(tl.int64) * num_splits + part) * NUM_HEADS + tl.program_id(0) + one
        part_acc = tl.load(
            partials_ptr + at[:, None] * LATENT + columns[None, :], mask=in_row, other=0.0
        )
        part_highest = tl.load(sums_ptr + at)
        part_total = tl.load(sums_ptr + most_partials + at)
        acc, highest, total = merge(acc, highest, total, part_acc, part_highest, part_total)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    at = token.to(tl.int64) * NUM_HEADS + tl.program_id(0) + one
    at_output = at[:, None] * LATENT + columns[None, :]
    tl.store(output_ptr + at_output, acc.to(output_ptr.dtype.element_ty), mask=in_row)


def attend(
    queries: LatentQueries,
    entries: LatentEntries,
    cache: LatentCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    scale: float,
    index: IndexQueries | None = None,
    choice: IndexChoice | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Runs models.ops.attention.latent_attention.latent_attention_with_output on a GPU.

    Queries and entries are transformed. choice: as in latent_steps. Launches may be captured.

    Raises:
        ValueError: as latent_attention says.
    """
    check_sizes(cache, len(output))
    _, index = cache_latents(queries, index, entries, None, cache, metadata.slot_mapping)
    if choice is not None and index is not None:
        choice.positions = choose_keys(index, cache, metadata, is_invariant=True)
    sizes, to_keys, to_values = queries.sizes, *queries.by_head()
    num_tokens, num_heads = output.shape[:2]
    q = output.new_empty(num_tokens, num_heads, sizes.latent + sizes.rotated)
    q[..., sizes.latent :] = queries.rotated
    head_linear(queries.plain, to_keys, q[..., : sizes.latent])
    attended = output.new_empty(num_tokens, num_heads, sizes.latent)
    if choice is None:
        _attend_absorbed(q, cache, metadata, attended, scale)
    else:
        positions = choice.positions
        latent_attention(q, cache, metadata, attended, scale, positions, sinks, is_invariant=True)
    head_linear(attended, to_values.transpose(1, 2), output)


def _attend_absorbed(
    q: torch.Tensor,
    cache: LatentCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    scale: float,
) -> None:
    """Attends q [T, H, C + P] to latent vectors; output is [T, H, C]."""
    num_tokens, num_heads, size = q.shape
    latent, workspace = output.shape[-1], metadata.workspace
    splits = 1 if workspace is None else MAX_LATENT_PARTIALS // num_tokens
    splits = max(1, min(MAX_SPLITS, splits))
    # Without a workspace kernels touch neither.
    partials = sums = output
    if workspace is not None:
        partials, sums = workspace.partials, workspace.lse
    most_partials = sums.numel() // 2
    is_float, has_scales = q.dtype.itemsize > 2, cache.latent_scale is not None
    # Products take 16 columns at least, and those of words of four elements are a quarter.
    block_c = max(64 if has_scales else 16, triton.next_power_of_2(latent))
    starts, lengths = metadata.query_start_loc, metadata.seq_lens
    form = LatentForm(
        num_heads=num_heads, latent=latent, rotated=size - latent,
        block_size=cache.latent.shape[1], has_scales=has_scales, is_sparse=False, heads=_HEADS,
        keys=16 if is_float else 32, stages=1 if is_float else 5, block_c=block_c,
        block_p=max(16, triton.next_power_of_2(size - latent)),
    )  # fmt: skip
    _invariant_latent_kernel[(triton.cdiv(num_heads, _HEADS), splits, num_tokens)](
        q, LatentCache(cache.latent, cache.latent_scale, cache.rotated), output, partials, sums,
        metadata.block_tables, lengths, starts, metadata.block_tables.stride(0), len(lengths),
        splits, most_partials, scale * LOG2_E, PART=PART, form=form, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _merge_latents_kernel[(num_heads, num_tokens)](
            partials, sums, output, lengths, starts, len(lengths), splits, most_partials,
            NUM_HEADS=num_heads, LATENT=latent, PART=PART, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
