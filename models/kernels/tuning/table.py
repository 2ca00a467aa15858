"""The tables of a GPU, and how kernels look tiles up in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import le
from typing import TypeVar

from models.kernels.tuning.tiles import (
    AttentionTiles,
    BlockTiles,
    ExpandedTiles,
    FP8ExpertTiles,
    GroupedTiles,
    MXFP4Tiles,
    StateTiles,
    VectorTiles,
)

_T = TypeVar("_T")
Rows = tuple[tuple[tuple[float, ...], _T], ...]
"""Tiles by the largest sizes that take them; the first row that fits counts."""
ByHead = Mapping[tuple[int, int], AttentionTiles]
"""Tiles by bytes of an element and padded head dimension, from 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Tiles of the kernels that run on any GPU. A GPU's file has these and says its capability.

    Products, which are torch's without a row, or with a row of None:
        vectors: of one and two tokens, by tokens, whether gated, outputs and inputs.
        fp8_vectors: of one token with an FP8 weight, by whether gated, outputs and inputs.
        fp8_blocks: of activations rounded by blocks, by tokens.

    Decode attention, of 2-byte elements in heads of up to 128 where nothing else is said:
        decode: by head, where no other table says more.
        beside_chunks: by head, for single tokens of steps with chunks or without new keys. A
            recorded step has tables for absent requests, so equal numbers of parts would be few.
        single_tokens: by requests times kv heads, with keys as wide as queries.
        whole, most_whole_heads: for up to EARLY_REQUESTS requests with at most as many query heads.
            The next product's early reads delay the reads of keys, more so the larger it is.
        held: for EARLY_REQUESTS requests of more heads.
        held_window, most_window_pairs: for windows of at most its held keys, and as many requests
            times kv heads: nothing is added up.
        broad, most_narrow_pairs: of heads of 256, for more requests times kv heads.
        broad_8: of heads of 256 with FP8 keys, whose parts are dealt.
        flat, flat_dealt: with FP8 keys, by the largest group of query heads; where parts are dealt.
        flat_held: with FP8 keys in groups of up to 8, by requests times kv heads. Groups of more
            than 4 do not take the first: with head norms its registers spill.
        flat_few, most_flat_pairs: in groups of 9 to 16, of as many requests times kv heads.
        prefixes: by head, of keys that several requests share; num_programs share them all. Rows of
            one byte are for FP8 keys and 2-byte queries.
        least_shared_bytes: keys and values of a layer that steps must not read again, by bytes of a
            cached element, for a common prefix to be read once.

    Chunks:
        narrow_queries, wide_queries: of few queries after an FP8 cache.
        first_chunk, later_chunk: by head, of chunks that begin their sequence and of others.
        expanded: of latent attention's expanded form, by bytes of an element.

    Batch-invariant attention:
        invariant: by head. Keys of an 8-bit cache take no other: tensor cores take converted keys
            in another order where they multiply few rows.
        invariant_many, many_pairs: from more requests times kv heads on, of 2-byte elements in
            heads of up to 128.
        invariant_most, most_pairs: from more on, in bfloat16.

    Experts, of gate and up and of down, by expert_forms.tile_rows:
        grouped_experts, grouped_experts_float: of 2-byte elements, and of others.
        grouped_experts_alone: for pairs that have a tile each; with the bits of other depths.
        fp8_experts: in 8 bits.
        fp8_experts_alone: for pairs computed alone, by features.
        mxfp4_experts, mxfp4_experts_float: by rows of a tile, of 2-byte activations and of others.
        mxfp4_experts_alone: for pairs computed alone.

    Recurrence:
        delta_steps: of the gated delta rule, by requests. Sums may differ in order.
    """

    vectors: Rows[VectorTiles | None]
    fp8_vectors: Rows[VectorTiles]
    fp8_blocks: Rows[BlockTiles]
    decode: ByHead
    beside_chunks: ByHead
    single_tokens: Rows[AttentionTiles]
    whole: AttentionTiles
    most_whole_heads: int
    held: AttentionTiles
    held_window: AttentionTiles
    most_window_pairs: int
    broad: AttentionTiles
    most_narrow_pairs: int
    broad_8: AttentionTiles
    flat: Rows[AttentionTiles]
    flat_dealt: Rows[AttentionTiles]
    flat_held: Rows[AttentionTiles]
    flat_few: AttentionTiles
    most_flat_pairs: int
    prefixes: ByHead
    least_shared_bytes: Mapping[int, int]
    narrow_queries: AttentionTiles
    wide_queries: AttentionTiles
    first_chunk: ByHead
    later_chunk: ByHead
    expanded: Mapping[int, ExpandedTiles]
    invariant: ByHead
    invariant_many: AttentionTiles
    many_pairs: int
    invariant_most: AttentionTiles
    most_pairs: int
    grouped_experts: Mapping[int, tuple[GroupedTiles, GroupedTiles]]
    grouped_experts_alone: tuple[GroupedTiles, GroupedTiles]
    grouped_experts_float: GroupedTiles
    fp8_experts: Mapping[int, tuple[FP8ExpertTiles, FP8ExpertTiles]]
    fp8_experts_alone: Rows[tuple[FP8ExpertTiles, FP8ExpertTiles]]
    mxfp4_experts: Mapping[int, MXFP4Tiles]
    mxfp4_experts_alone: MXFP4Tiles
    mxfp4_experts_float: MXFP4Tiles
    delta_steps: Rows[StateTiles]


def look_up(rows: Rows[_T], *sizes: float) -> _T | None:
    """Returns the tiles of the first row whose limits no size is over; None if there is none."""
    for limits, tiles in rows:
        if all(map(le, sizes, limits)):
            return tiles
    return None


def row_of(rows: Rows[_T], *sizes: float) -> _T:
    """Returns the tiles of the first row that fits, of a table whose last row takes any size."""
    tiles = look_up(rows, *sizes)
    assert tiles is not None, "the last row takes any size"
    return tiles
