"""The tiles of FP8 experts: which there are, and the warp that fetches them.

Tiles are in the order of tokens and then of rows, and programs take them in turns: those of a time
have few experts, whose weights then come from the second-level cache for all programs but one. With
a run of tiles for each program 8192 tokens of Qwen3-30B-A3B took 1311 us instead of 898 (H200,
2026-11).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from models.kernels.experts.fp8.fp8_rows import scale_row
from models.kernels.experts.token_tiles import after, tiles_of_experts
from models.kernels.launching.dependent_launch import wait_for_previous
from models.kernels.launching.gluon_names import load_box, reinterpret
from models.kernels.products.fp8.fp8_operands import DEPTH
from models.number_formats import BLOCK

OUTPUTS = gl.constexpr(BLOCK)
"""Of a tile: a block of rows that share scales of weights, and scales of rounded results."""


@gluon.jit
def count_tiles(
    starts_ptr, num_rows, NUM_EXPERTS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_E: gl.constexpr,
    ROW_TILES: gl.constexpr, IS_ALONE: gl.constexpr,
):  # fmt: skip
    """Returns the number of tiles of all programs."""
    if IS_ALONE:
        return num_rows * ROW_TILES
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        counts = tiles_of_experts(starts_ptr, NUM_EXPERTS, TOKENS, BLOCK_E)[3]
        return gl.sum(counts, 0) * ROW_TILES


@gluon.jit
def find_rows(
    token_tile, pairs_ptr, starts_ptr, NUM_EXPERTS: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK_E: gl.constexpr, IS_ALONE: gl.constexpr,
):  # fmt: skip
    """Returns a tile's expert, its first row, the end of the expert's rows, and scale_row of it.

    IS_ALONE: each row is a pair of a token and an expert, which pairs_ptr names.
    """
    if IS_ALONE:
        expert = gl.load(pairs_ptr + token_tile)
        end = gl.where(expert < NUM_EXPERTS, token_tile + 1, token_tile)
        place = scale_row(token_tile, token_tile, expert, IS_ALONE)
        return gl.minimum(expert, NUM_EXPERTS - 1), token_tile, end, place
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        experts, starts, ends, counts, before = tiles_of_experts(
            starts_ptr, NUM_EXPERTS, TOKENS, BLOCK_E
        )
        is_own = (before <= token_tile) & (token_tile < before + counts)
        expert = gl.sum(gl.where(is_own, experts, 0), 0)
        start = gl.sum(gl.where(is_own, starts, 0), 0)
        end = gl.sum(gl.where(is_own, ends, 0), 0)
        first_row = start + (token_tile - gl.sum(gl.where(is_own, before, 0), 0)) * TOKENS
        return expert, first_row, end, scale_row(first_row, start, expert, IS_ALONE)


@gluon.jit
def _has_rows(box, place, ring):
    """Returns whether a box of a tile's tokens has any; the first one has."""
    return (box == 0) | (place[1] + box * ring[1].shape[1] < place[2])


@gluon.jit
def _fetch_weights(weight, ring, slot, place, row_tile, step):
    """Starts a step with the matrix's rows, and expects the tokens that the tile has."""
    weights, xs, scales, full, _empty = ring
    HALVES: gl.constexpr = weights.shape[1]
    BOXES: gl.constexpr = xs.shape[0] // weights.shape[0]
    MATRIX_BYTES: gl.constexpr = HALVES * OUTPUTS * DEPTH
    BOX_BYTES: gl.constexpr = xs.shape[1] * DEPTH + scales.shape[2] * 4
    is_whole = _has_rows(BOXES - 1, place, ring)
    mbarrier.expect(full.index(slot), MATRIX_BYTES + BOXES * BOX_BYTES, is_whole)
    if BOXES > 1:
        mbarrier.expect(full.index(slot), MATRIX_BYTES + BOX_BYTES, is_whole == 0)
    place = [place[0] * HALVES, row_tile * OUTPUTS, step * DEPTH]
    load_box(weight, place, full.index(slot), weights.index(slot))


@gluon.jit
def _fetch_tokens(x, x_scale, ring, slot, place, step):
    weights, xs, scales, full, _empty = ring
    BOXES: gl.constexpr = xs.shape[0] // weights.shape[0]
    ready = full.index(slot)
    for box in gl.static_range(BOXES):
        before = box * xs.shape[1]
        is_there = _has_rows(box, place, ring)
        at = [place[1] + before, step * DEPTH]
        load_box(x, at, ready, xs.index(slot * BOXES + box), is_there)
        at = [step, place[3] + before]
        target = scales.index(slot * BOXES + box)
        load_box(x_scale, at, ready, target, is_there)


@gluon.jit
def _scales_of(
    scale_ptr, expert, row_tile, HALVES: gl.constexpr, NUM_OUTPUTS: gl.constexpr,
    ROW_TILES: gl.constexpr, STEPS: gl.constexpr, BY_ROW: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """Returns the scales of both halves of a tile, one for each step, or for each row if BY_ROW."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    index = gl.arange(0, TABLE, flat)
    # Of a half.
    LENGTH: gl.constexpr = NUM_OUTPUTS if BY_ROW else ROW_TILES * STEPS
    if BY_ROW:
        index = gl.minimum(row_tile * OUTPUTS + index, NUM_OUTPUTS - 1)
    else:
        index = row_tile * STEPS + gl.minimum(index, STEPS - 1)
    scale_ptr += expert.to(gl.int64) * (HALVES * LENGTH)
    up_ptr = scale_ptr + (HALVES - 1) * LENGTH
    return gl.load(scale_ptr + index), gl.load(up_ptr + index)


@gluon.jit
def _look_up(
    tile, scale_ptr, pairs_ptr, starts_ptr, HALVES: gl.constexpr, NUM_EXPERTS: gl.constexpr,
    TOKENS: gl.constexpr, BLOCK_E: gl.constexpr, NUM_OUTPUTS: gl.constexpr,
    ROW_TILES: gl.constexpr, STEPS: gl.constexpr, TABLE: gl.constexpr, IS_ALONE: gl.constexpr,
    BY_ROW: gl.constexpr, HAS_PAIRS: gl.constexpr,
):  # fmt: skip
    """Returns what find_rows says of a tile, its scales, and its rows' pairs if HAS_PAIRS."""
    place = find_rows(
        tile // ROW_TILES, pairs_ptr, starts_ptr, NUM_EXPERTS, TOKENS, BLOCK_E, IS_ALONE
    )
    scales = _scales_of(
        scale_ptr, place[0], tile % ROW_TILES, HALVES, NUM_OUTPUTS, ROW_TILES, STEPS, BY_ROW, TABLE
    )
    pairs = place[1]
    if HAS_PAIRS:
        rows = place[1] + gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [1], [0]))
        pairs = gl.load(pairs_ptr + rows, mask=rows < place[2], other=0)
    return place, scales, pairs


@gluon.jit
def _announce(notices, turn, place, scales, pairs):
    """Gives the groups a tile's expert, first row, end of rows, first scale, and more of _look_up.

    There is room for two tiles.
    """
    facts, tables, tile_pairs, written, read = notices
    expert, first_row, end, first_scale = place
    HALVES: gl.constexpr = tables.shape[0] // 2
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    index = gl.arange(0, 32, flat)
    numbers = gl.where(index == 1, first_row, gl.where(index == 2, end, first_scale))
    numbers = gl.where(index == 0, expert, numbers)
    at, phase = turn & 1, turn >> 1 & 1
    mbarrier.wait(read.index(at), phase ^ 1)
    facts.index(at).store(numbers)
    tables.index(HALVES * at).store(scales[0])
    if HALVES == 2:
        tables.index(HALVES * at + 1).store(scales[1])
    if tile_pairs[0] is not None:
        tile_pairs[0].index(at).store(pairs)
    mbarrier.arrive(written.index(at))


@gluon.jit
def _fetch_tile(
    first_step, x, x_scale, weight, ring, slot, phase, place, row_tile, STEPS: gl.constexpr
):
    """Fetches a tile's steps from first_step on; returns the position in the ring."""
    empty = ring[4]
    for step in range(first_step, STEPS):
        mbarrier.wait(empty.index(slot), phase)
        _fetch_weights(weight, ring, slot, place, row_tile, step)
        _fetch_tokens(x, x_scale, ring, slot, place, step)
        slot, phase = after(slot, phase, ring[0].shape[0])
    return slot, phase


@gluon.jit
def fetch(
    x, x_scale, weight, ring, notices, scale_ptr, pairs_ptr, starts_ptr, num_rows,
    STEPS: gl.constexpr, NUM_OUTPUTS: gl.constexpr, NUM_EXPERTS: gl.constexpr,
    BLOCK_E: gl.constexpr, ROW_TILES: gl.constexpr, IS_ALONE: gl.constexpr,
    BY_ROW: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Fetches the program's tiles, in one warp; weights first, as they wait for no kernel.

    It looks the next tile up before it fetches a tile, while the groups still have slots to empty.
    """
    SLOTS: gl.constexpr = ring[0].shape[0]
    TOKENS: gl.constexpr = ring[1].shape[0] // SLOTS * ring[1].shape[1]
    HALVES: gl.constexpr = ring[0].shape[1]
    TABLE: gl.constexpr = notices[1].shape[1]
    FIRST: gl.constexpr = min(SLOTS, STEPS)
    HAS_PAIRS: gl.constexpr = notices[2][0] is not None
    tile = gl.program_id(0)
    num_tiles = count_tiles(starts_ptr, num_rows, NUM_EXPERTS, TOKENS, BLOCK_E, ROW_TILES, IS_ALONE)
    if tile < num_tiles:
        place, scales, pairs = _look_up(
            tile, scale_ptr, pairs_ptr, starts_ptr, HALVES, NUM_EXPERTS, TOKENS, BLOCK_E,
            NUM_OUTPUTS, ROW_TILES, STEPS, TABLE, IS_ALONE, BY_ROW, HAS_PAIRS,
        )  # fmt: skip
        for step in range(FIRST):
            _fetch_weights(weight, ring, step, place, tile % ROW_TILES, step)
        wait_for_previous(DEPENDENT)
        for step in range(FIRST):
            _fetch_tokens(x, x_scale, ring, step, place, step)
        slot, phase, first_step, turn = FIRST % SLOTS, FIRST // SLOTS ^ 1, FIRST, 0
        while tile < num_tiles:
            _announce(notices, turn, place, scales, pairs)
            before, row_tile = place, tile % ROW_TILES
            tile += gl.num_programs(0)
            turn += 1
            place, scales, pairs = _look_up(
                gl.minimum(tile, num_tiles - 1), scale_ptr, pairs_ptr, starts_ptr, HALVES,
                NUM_EXPERTS, TOKENS, BLOCK_E, NUM_OUTPUTS, ROW_TILES, STEPS, TABLE, IS_ALONE,
                BY_ROW, HAS_PAIRS,
            )  # fmt: skip
            slot, phase = _fetch_tile(
                first_step, x, x_scale, weight, ring, slot, phase, before, row_tile, STEPS
            )
            first_step = 0
    else:
        wait_for_previous(DEPENDENT)


@gluon.jit
def fact(facts, index: gl.constexpr):
    """Returns a number that all threads of a group read."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(reinterpret(facts, gl.int32, [32, 1], plain).index(index).load(flat), 0)
