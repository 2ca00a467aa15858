"""Results for the keys that several requests share, one for each part of them.

A plan's tiles are up to TILE_QUERIES queries each; a tile's keys are cut into parts of one length
for all tiles. prefix_attention stores the results of all parts, and attention to a request's own
keys begins its running softmax with them, those of one tile for each prefix of a query.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from models.forward_context import MAX_PREFIX_LEVELS, MAX_PREFIX_TILES, TILE_QUERIES
from models.kernels.attention.decode.newest_token import repeated
from models.kernels.attention.key_parts import sum_parts
from models.kernels.attention.uniform_values import uniform

LEAST_PREFIX_PART = 256
"""Fewest keys of a part that is not the last."""

SLOTS = tl.constexpr(MAX_PREFIX_LEVELS + 1)
"""Entries of a request in tile_slots."""
_TILES = tl.constexpr(MAX_PREFIX_TILES)
_HALF = tl.constexpr(MAX_PREFIX_TILES // 2)
"""Tiles of which each lane of a warp has one: sums over more would be exchanges between warps."""
_QUERIES = tl.constexpr(TILE_QUERIES)
_LEAST_PART = tl.constexpr(LEAST_PREFIX_PART)
_UNIT = tl.constexpr(64)


class PrefixParts(NamedTuple):
    """prefix_partials and prefix_lse of an AttentionWorkspace; in a kernel these are pointers."""

    partials: Any
    lse: Any


@triton.jit
def share_out(tiles_ptr, NUM_PROGRAMS: tl.constexpr):
    """Cuts the keys of a plan's tiles into about one part for each of NUM_PROGRAMS.

    There are at most as many parts as programs, or twice as many as tiles. Returns the keys of a
    part; of each tile its parts, and the number of the part after its last, in two halves of tiles.
    """
    num_keys_ptr = tiles_ptr + 3 * _TILES + tl.arange(0, _HALF)
    first, second = tl.load(num_keys_ptr), tl.load(num_keys_ptr + _HALF)
    num_tiles = tl.sum((first > 0).to(tl.int32) + (second > 0).to(tl.int32), 0)
    wanted = tl.maximum(tl.maximum(NUM_PROGRAMS - num_tiles, num_tiles), 1)
    part = tl.maximum(tl.cdiv(tl.sum(first + second, 0), wanted), _LEAST_PART)
    part = tl.cdiv(part, _UNIT) * _UNIT
    first, second = tl.cdiv(first, part), tl.cdiv(second, part)
    ends = tl.cumsum(first, 0), tl.sum(first, 0) + tl.cumsum(second, 0)
    return part, (first, second), ends


@triton.jit
def tile_of_part(part, ends):
    """Returns the tile that has a part, by the part's number; ends: of share_out."""
    first, second = ends
    return tl.sum((first <= part).to(tl.int32) + (second <= part).to(tl.int32), 0)


@triton.jit
def parts_of_tile(tile, num_parts, ends):
    """Returns the number of a tile's first part, and its parts; the arguments are of share_out."""
    lanes = tl.arange(0, _HALF)
    in_first, in_second = lanes == tile, lanes + _HALF == tile
    counts = tl.where(in_first, num_parts[0], 0) + tl.where(in_second, num_parts[1], 0)
    count = tl.sum(counts, 0)
    end = tl.sum(tl.where(in_first, ends[0], 0) + tl.where(in_second, ends[1], 0), 0)
    return end - count, count


@triton.jit
def row_of_query(
    kv_head, first_part, count, place, GROUP: tl.constexpr, NUM_PROGRAMS: tl.constexpr
):
    """Returns the first row of the results of a tile's query; those of its parts follow."""
    MOST_PARTS: tl.constexpr = NUM_PROGRAMS if NUM_PROGRAMS > 2 * _TILES else 2 * _TILES
    return ((kv_head * MOST_PARTS + first_part) * _QUERIES + place * count) * GROUP


@triton.jit
def begin_with_prefixes(
    acc, highest, total, place, slots_ptr, tiles_ptr, parts, kv_head, dims, form: tl.constexpr
):
    """Adds a single query's shared keys to a softmax that has seen at most its newest key.

    acc, highest, total: of form.head_rows rows, which repeat the heads of the group.
    place: the first of the request's tile_slots; slots_ptr: where that is. form: DecodeForm.
    """
    if place >= 0:
        _, num_parts, ends = share_out(tiles_ptr, form.prefix_programs)
        heads = tl.arange(0, form.padded_group)
        while place >= 0:
            first_part, count = parts_of_tile(place // _QUERIES, num_parts, ends)
            row = row_of_query(
                kv_head, first_part, count, place % _QUERIES, form.group, form.prefix_programs
            )
            shared, shared_highest, shared_total = sum_parts(
                parts.partials + row * form.head_dim, parts.lse + row, count, heads, dims,
                form.group, form.head_dim, form.block_d, form.at_once,
            )  # fmt: skip
            shared = repeated(shared, form.head_rows)
            shared_highest = repeated(shared_highest, form.head_rows)
            shared_total = repeated(shared_total, form.head_rows)
            new_highest = tl.maximum(highest, shared_highest)
            kept, weight = tl.exp2(highest - new_highest), tl.exp2(shared_highest - new_highest)
            acc = acc * kept[:, None] + shared * weight[:, None]
            total = total * kept + shared_total * weight
            highest = new_highest
            slots_ptr += 1
            place = uniform(tl.load(slots_ptr), form.has_scales and form.has_assembly)
    return acc, highest, total


@triton.jit
def fold_prefixes(
    acc, highest, total, queries, heads, in_rows, dims, slots_ptr, tiles_ptr, parts, kv_head,
    form: tl.constexpr,
):  # fmt: skip
    """Adds the shared keys of a request with several queries to the running softmax of its rows.

    queries, heads: of each row, in the request and in the group. slots_ptr: the request's
    tile_slots. form: DraftForm.
    """
    place = tl.load(slots_ptr)
    if place >= 0:
        _, num_parts, ends = share_out(tiles_ptr, form.prefix_programs)
        in_tile = in_rows[:, None] & (dims < form.head_dim)[None, :]
        while place >= 0:
            # The tiles of a prefix have equally many parts, and follow one another.
            first_part, count = parts_of_tile(place // _QUERIES, num_parts, ends)
            at = place % _QUERIES + queries
            first_part += at // _QUERIES * count
            rows = row_of_query(
                kv_head, first_part, count, at % _QUERIES, form.group, form.prefix_programs
            )
            rows += heads
            for part in range(count):
                at_parts = rows + part * form.group
                lse = tl.load(parts.lse + at_parts, mask=in_rows, other=-1e30)
                at_values = at_parts[:, None] * form.head_dim + dims[None, :]
                values = tl.load(parts.partials + at_values, mask=in_tile, other=0.0)
                new_highest = tl.maximum(highest, lse)
                kept, weight = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
                acc = acc * kept[:, None] + values * weight[:, None]
                total = total * kept + weight
                highest = new_highest
            slots_ptr += 1
            place = tl.load(slots_ptr)
    return acc, highest, total
