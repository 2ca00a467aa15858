"""Attention of a prompt chunk to keys and values that are expanded from latent vectors.

Keys are expanded in pieces of bounded size. A piece continues the softmax of those before it: the
output and the logarithms of its sums are all that a piece leaves to the next.
"""

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata, PromptChunk
from models.kernels.attention.configurations import fitting_keys
from models.kernels.attention.latent.latent_forms import keys_at_once
from models.kernels.attention.latent.latent_reading import read_latents
from models.kernels.launching.copy_engine import COPY_ALIGNMENT
from models.kernels.tuning.registry import tables_on
from models.kernels.tuning.tiles import ExpandedTiles
from models.kv_cache import LatentCacheData
from models.operands.base_two import LOG2_E
from models.operands.latent_queries import LatentQueries, LatentSizes

_VARYING = [
    "seq_lens_ptr", "request", "first_token", "num_queries", "first_key", "num_keys",
]  # fmt: skip  # specialising on these would compile again while serving

_MOST_PLAIN = 128
_MOST_ROTATED = 64
"""Largest parts of a head that fit the tiles."""


@triton.jit
def _fold_keys(
    q_plain, q_rotated, acc, highest, total, start, end, positions, expanded_ptr, shared_ptr,
    scale_log2,
    NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTATED: tl.constexpr, VALUE: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr, IS_DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Folds the keys in [start, end) of a piece and of one head into a running softmax.

    Off the diagonal all rows see all keys, and end - start is a multiple of KEYS.
    """
    plain = tl.arange(0, BLOCK_N)[None, :]
    rotated = tl.arange(0, BLOCK_P)[None, :]
    dims = tl.arange(0, BLOCK_V)[None, :]
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        keys = first + tl.arange(0, KEYS)
        is_key = keys[:, None] < end
        head_ptrs = expanded_ptr + keys[:, None] * (NUM_HEADS * (PLAIN + VALUE))
        shared_ptrs = shared_ptr + keys[:, None] * ROTATED
        k = tl.load(head_ptrs + plain, mask=is_key & (plain < PLAIN), other=0.0)
        k_rotated = tl.load(shared_ptrs + rotated, mask=is_key & (rotated < ROTATED), other=0.0)
        v = tl.load(head_ptrs + PLAIN + dims, mask=is_key & (dims < VALUE), other=0.0)
        scores = tl.dot(q_plain, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(k_rotated), scores, input_precision="ieee")
        if IS_DIAGONAL:
            is_seen = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
            scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        if IS_DIAGONAL:
            # A row may see no key of a tile; a finite number avoids inf - inf.
            new_highest = tl.maximum(new_highest, -1e30)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        kept = tl.exp2(highest - new_highest)
        total = total * kept + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        highest = new_highest
    return acc, highest, total


@triton.jit(do_not_specialize=_VARYING)
def _expanded_kernel(
    plain_ptr, rotated_ptr, expanded_ptr, shared_ptr, output_ptr, lse_ptr, seq_lens_ptr,
    request, first_token, num_queries, first_key, num_keys, plain_stride, rotated_stride,
    scale_log2,
    NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTATED: tl.constexpr, VALUE: tl.constexpr,
    PLAIN_STEP: tl.constexpr, ROTATED_STEP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attends QUERIES tokens, one head each, to a piece of their sequence's keys."""
    head = tl.program_id(0)
    # The last tiles of a chunk see the most keys; they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    first_query = tile * QUERIES
    num_before = tl.load(seq_lens_ptr + request) - num_queries
    # Keys count from the piece's first one from here on.
    end = num_before + tl.minimum(first_query + QUERIES, num_queries) - first_key
    end = tl.minimum(end, num_keys)
    has_earlier = first_key > 0
    if has_earlier & (end <= 0):
        return  # queries of before this piece
    queries = first_query + tl.arange(0, QUERIES)
    in_rows = queries < num_queries
    positions = num_before + queries - first_key
    tokens = (first_token + queries).to(tl.int64)
    plain = tl.arange(0, BLOCK_N)
    rotated = tl.arange(0, BLOCK_P)
    dims = tl.arange(0, BLOCK_V)
    q_plain = tl.load(
        plain_ptr + tokens[:, None] * plain_stride + head * PLAIN_STEP + plain[None, :],
        mask=in_rows[:, None] & (plain < PLAIN)[None, :],
        other=0.0,
    )
    q_rotated = tl.load(
        rotated_ptr + tokens[:, None] * rotated_stride + head * ROTATED_STEP + rotated[None, :],
        mask=in_rows[:, None] & (rotated < ROTATED)[None, :],
        other=0.0,
    )
    output_ptrs = output_ptr + (tokens * NUM_HEADS + head)[:, None] * VALUE + dims[None, :]
    in_output = in_rows[:, None] & (dims < VALUE)[None, :]
    lse_ptrs = lse_ptr + queries * NUM_HEADS + head
    # The result of earlier pieces counts as one key with the sum of their exponentials.
    acc = tl.load(output_ptrs, mask=in_output & has_earlier, other=0.0).to(tl.float32)
    highest = tl.load(lse_ptrs, mask=in_rows & has_earlier, other=float("-inf"))
    total = tl.where(highest > float("-inf"), 1.0, 0.0)
    # Every row sees the keys up to the first one's position; whole tiles of them need no mask.
    diagonal = tl.minimum(num_before + first_query + 1 - first_key, num_keys)
    diagonal = tl.maximum(diagonal, 0) // KEYS * KEYS
    expanded_ptr += head * (PLAIN + VALUE)
    acc, highest, total = _fold_keys(
        q_plain, q_rotated, acc, highest, total, 0, diagonal, positions, expanded_ptr, shared_ptr,
        scale_log2, NUM_HEADS, PLAIN, ROTATED, VALUE, KEYS, BLOCK_N, BLOCK_P, BLOCK_V,
        STAGES, False,
    )  # fmt: skip
    acc, highest, total = _fold_keys(
        q_plain, q_rotated, acc, highest, total, diagonal, end, positions, expanded_ptr,
        shared_ptr, scale_log2, NUM_HEADS, PLAIN, ROTATED, VALUE, KEYS, BLOCK_N, BLOCK_P,
        BLOCK_V, STAGES, True,
    )  # fmt: skip
    # A dummy request has no keys; its output is zero.
    is_live = total > 0.0
    acc = acc / tl.where(is_live, total, 1.0)[:, None]
    lse = tl.where(is_live, highest + tl.log2(tl.where(is_live, total, 1.0)), float("-inf"))
    tl.store(output_ptrs, acc.to(output_ptr.dtype.element_ty), mask=in_output)
    tl.store(lse_ptrs, lse, mask=in_rows)


def takes(sizes: LatentSizes, itemsize: int) -> bool:
    """Returns whether the kernel takes such heads: rows are aligned, and tiles hold them."""
    rows = (sizes.latent, sizes.rotated, sizes.plain, sizes.value)
    return (
        max(sizes.plain, sizes.value) <= _MOST_PLAIN
        and sizes.rotated <= _MOST_ROTATED
        and not any(size * itemsize % COPY_ALIGNMENT for size in rows)
    )


def expanded_attention(
    queries: LatentQueries,
    cache: LatentCacheData,
    metadata: AttentionMetadata,
    chunk: PromptChunk,
    output: torch.Tensor,
    scale: float,
) -> None:
    """Attends a chunk's queries to its sequence's keys up to their own, expanded from the cache.

    The host knows an upper bound of the sequence's length; the kernel reads the length itself.

    queries: of the step's tokens; the cache has this step's entries.
    output: [T, H, V], contiguous; the chunk's rows are overwritten.
    scale: factor of the scores.
    """
    sizes, num_heads = queries.sizes, queries.plain.shape[1]
    block_size = cache.latent.shape[1]
    at_once = keys_at_once(
        sizes, num_heads=num_heads, itemsize=output.itemsize, block_size=block_size
    )
    block_ids = metadata.block_tables[chunk.request]
    lse = torch.empty(chunk.num_queries, num_heads, dtype=torch.float32, device=output.device)
    # Of the largest piece for every chunk, so that a measured step needs what any step needs.
    memory = output.new_empty(at_once, len(queries.projections))
    tiles = _tiles(output.itemsize, output.device)
    grid = (num_heads, triton.cdiv(chunk.num_queries, tiles.queries))
    for first in range(0, chunk.num_keys, at_once):
        end = min(first + at_once, chunk.num_keys)
        blocks = block_ids[first // block_size : triton.cdiv(end, block_size)]
        latent, shared = read_latents(cache, blocks, output.dtype)
        expanded = memory[: len(latent)]
        torch.mm(latent, queries.projections.t(), out=expanded)
        _expanded_kernel[grid](
            queries.plain, queries.rotated, expanded, shared, output, lse, metadata.seq_lens,
            chunk.request, chunk.first_token, chunk.num_queries, first, end - first,
            queries.plain.stride(0), queries.rotated.stride(0), scale * LOG2_E,
            NUM_HEADS=num_heads, PLAIN=sizes.plain, ROTATED=sizes.rotated, VALUE=sizes.value,
            PLAIN_STEP=queries.plain.stride(1), ROTATED_STEP=queries.rotated.stride(1),
            QUERIES=tiles.queries, KEYS=tiles.keys,
            BLOCK_N=max(16, triton.next_power_of_2(sizes.plain)),
            BLOCK_P=max(16, triton.next_power_of_2(sizes.rotated)),
            BLOCK_V=max(16, triton.next_power_of_2(sizes.value)), STAGES=tiles.num_stages,
            num_warps=tiles.num_warps,
        )  # fmt: skip


@lru_cache
def _tiles(itemsize: int, device: torch.device) -> ExpandedTiles:
    """Returns the tiles, which fit into shared memory with the largest heads."""
    tiles = tables_on(device).expanded[itemsize]
    keys, stages = fitting_keys(
        tiles.keys, tiles.num_stages, key_bytes=(2 * _MOST_PLAIN + _MOST_ROTATED) * itemsize,
        rows=tiles.queries, row_bytes=(_MOST_PLAIN + _MOST_ROTATED) * itemsize, itemsize=itemsize,
        device=device,
    )  # fmt: skip
    return replace(tiles, keys=keys, num_stages=stages)
