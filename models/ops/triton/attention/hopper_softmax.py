"""A warpgroup of hopper_attention: products and softmax of half of a tile's rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from models.number_formats import FP8_MAX, SMALLEST_AMAX
from models.ops.operands.base_two import LOG2_E
from models.ops.triton.attention.hopper_copies import NUM_NOTES

_LOG2_E = gl.constexpr(LOG2_E)
_FP8_MAX = gl.constexpr(FP8_MAX)
_SMALLEST_AMAX = gl.constexpr(SMALLEST_AMAX)

ROWS = gl.constexpr(64)
"""Rows of a warpgroup's products (PTX ISA, wgmma)."""


@gluon.jit
def _read(notes, place):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(notes.index(place).load(layout), 0)


@gluon.jit
def _see_nothing(layout: gl.constexpr):
    """Returns highest and total of rows that have seen no key: online_softmax.see_nothing."""
    highest = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, layout))
    return highest, gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))


@gluon.jit
def _before_keys(
    head, sinks_ptr, layout: gl.constexpr, GROUP: gl.constexpr, HAS_SINKS: gl.constexpr
):
    """Returns the highest score and the total of rows before they see any key."""
    highest, total = _see_nothing(layout)
    if HAS_SINKS:
        # Scores without keys count as if seen first.
        sinks = gl.load(sinks_ptr + head, mask=head < GROUP, other=0.0)
        highest = sinks.to(gl.float32) * _LOG2_E
        total = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, layout))
    return highest, total


@gluon.jit
def _score(q, k_ring, num_tiles, layout: gl.constexpr):
    """Starts the product of queries and a tile of keys once the tile has arrived."""
    tiles, full = k_ring
    STAGES: gl.constexpr = tiles.shape[0]
    KEYS: gl.constexpr = tiles.shape[1]
    stage = num_tiles % STAGES
    mbarrier.wait(full.index(stage), num_tiles // STAGES & 1)
    k = tiles.index(stage).permute((1, 0))
    nothing = gl.zeros([ROWS, KEYS], gl.float32, layout)
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _row_sums(weights, SETS: gl.constexpr):
    """Has the bits of online_softmax's function."""
    if SETS == 1:
        return gl.sum(weights, 1)
    KEYS: gl.constexpr = weights.shape[1]
    turns = weights.reshape([ROWS, KEYS // (8 * SETS), SETS, 8])
    sets = turns.permute([0, 2, 1, 3]).reshape([ROWS, SETS, KEYS // SETS])
    sums = gl.sum(gl.sum(sets, 2), 1)
    return gl.convert_layout(sums, gl.SliceLayout(1, weights.type.layout))


@gluon.jit
def _weigh(
    scores, highest, total, first_key, first_position, positions, scale_log2, DTYPE: gl.constexpr,
    WINDOW: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """Returns the weights of one tile of keys, the factor of earlier ones, highest and total.

    Has the bits of online_softmax.weigh_keys with tiles of as many keys and SETS. The weights are
    in the register layout that tensor cores take them in.
    """
    layout: gl.constexpr = scores.type.layout
    KEYS: gl.constexpr = scores.shape[1]
    # Every row sees the keys up to the first one's position.
    if first_key + KEYS > first_position + 1 or WINDOW > 0:
        keys = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        is_seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (keys[None, :] > positions[:, None] - WINDOW)
        scores = gl.where(is_seen, scores, float("-inf"))
    new_highest = gl.maximum(highest, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(gl.fma(scores, scale_log2, -new_highest[:, None]))
    kept = gl.exp2(highest - new_highest)
    total = gl.fma(total, kept, _row_sums(weights, SETS))
    operand = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, layout, 2))
    return operand, kept, new_highest, total


@gluon.jit
def _attend_keys(
    q, scores, highest, total, k_ring, v_ring, released, num_tiles, first, last, end,
    first_position, positions, scale_log2, WINDOW: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """Attends to the keys in [first, last), of which the first tile's scores are known.

    Returns weighted values, highest, total, the scores of the tile at `last` if that is before
    `end`, and num_tiles. The product with a tile's values and that with the next tile's keys are
    issued together; while one warpgroup waits for them, the other computes weights.
    """
    v_tiles, v_full = v_ring
    STAGES: gl.constexpr = v_tiles.shape[0]
    KEYS: gl.constexpr = v_tiles.shape[1]
    HEAD_DIM: gl.constexpr = v_tiles.shape[2]
    scores_layout: gl.constexpr = scores.type.layout
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
    for first_key in range(first, last, KEYS):
        weights, kept, highest, total = _weigh(
            scores, highest, total, first_key, first_position, positions, scale_log2,
            q.dtype, WINDOW, SETS,
        )  # fmt: skip
        acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, acc_layout))[:, None]
        stage = num_tiles % STAGES
        mbarrier.wait(v_full.index(stage), num_tiles // STAGES & 1)
        sums = warpgroup_mma(weights, v_tiles.index(stage), acc, is_async=True)
        num_tiles += 1
        if first_key + KEYS < end:
            next_scores = _score(q, k_ring, num_tiles, scores_layout)
            scores, acc = warpgroup_mma_wait(0, [next_scores, sums])
            # The keys of this tile and the values of the one before have been read.
            mbarrier.arrive(released.index(num_tiles % STAGES), count=1)
        else:
            acc = warpgroup_mma_wait(0, [sums])
    return acc, highest, total, scores, num_tiles


@gluon.jit
def _merge(acc, highest, total, part_acc, part_highest, part_total):
    """Folds one part of the keys into those before it: invariant_attention has the same bits."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    new_highest = gl.maximum(highest, part_highest)
    kept, weight = gl.exp2(highest - new_highest), gl.exp2(part_highest - new_highest)
    total = gl.fma(total, kept, part_total * weight)
    kept, weight = gl.convert_layout(kept, layout), gl.convert_layout(weight, layout)
    acc = gl.fma(acc, kept[:, None], part_acc * weight[:, None])
    return acc, new_highest, total


@gluon.jit
def _attend(
    half: gl.constexpr, q, k_ring, v_ring, released, num_tiles, first, end, first_position,
    sinks_ptr, scale_log2,
    GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    PART: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """Returns the attention of a warpgroup's rows to the keys in [first, end), and num_tiles.

    num_tiles counts the tiles of keys so far. PART > 0: each part of PART keys, by position, has a
    softmax of its own.
    """
    KEYS: gl.constexpr = v_ring[0].shape[1]
    HEAD_DIM: gl.constexpr = v_ring[0].shape[2]
    STAGES: gl.constexpr = v_ring[0].shape[0]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    rows = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
    positions = first_position + rows // PADDED_GROUP
    highest, total = _before_keys(rows % PADDED_GROUP, sinks_ptr, scores_layout, GROUP, HAS_SINKS)
    scores = warpgroup_mma_wait(0, [_score(q, k_ring, num_tiles, scores_layout)])
    mbarrier.arrive(released.index(num_tiles % STAGES), count=1)
    if PART == 0:
        acc, highest, total, scores, num_tiles = _attend_keys(
            q, scores, highest, total, k_ring, v_ring, released, num_tiles, first, end, end,
            first_position, positions, scale_log2, WINDOW, SETS,
        )  # fmt: skip
    else:
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
        for part in range(first // PART, (end + PART - 1) // PART):
            part_highest, part_total = _see_nothing(scores_layout)
            part_acc, part_highest, part_total, scores, num_tiles = _attend_keys(
                q, scores, part_highest, part_total, k_ring, v_ring, released, num_tiles,
                gl.maximum(part * PART, first), gl.minimum((part + 1) * PART, end), end,
                first_position, positions, scale_log2, WINDOW, SETS,
            )  # fmt: skip
            acc, highest, total = _merge(acc, highest, total, part_acc, part_highest, part_total)
    return acc / gl.convert_layout(total, gl.SliceLayout(1, acc_layout))[:, None], num_tiles


@gluon.jit
def _write(
    half: gl.constexpr, tile, outputs, query_start, first_query, num_queries, kv_head,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr,
):  # fmt: skip
    """Stores the results of a warpgroup's rows, rounded to FP8 if there are scales to store."""
    output_ptr, scale_ptr, scale_stride = outputs
    HEAD_DIM: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    rows = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    queries = first_query + rows // PADDED_GROUP
    head = rows % PADDED_GROUP
    token = (query_start + queries).to(gl.int64)
    at_heads = ((token * NUM_KV_HEADS + kv_head) * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
    in_rows = (queries < num_queries) & (head < GROUP)
    values = tile.load(layout)
    if scale_ptr is not None:
        # As in store_heads.
        exact = values.to(gl.float32)
        scale = gl.maximum(gl.max(gl.abs(exact), 1), _SMALLEST_AMAX) / _FP8_MAX
        scaled = gl.minimum(gl.maximum(exact / scale[:, None], -_FP8_MAX), _FP8_MAX)
        values = scaled.to(output_ptr.dtype.element_ty)
        at_scales = (kv_head * GROUP + head) * scale_stride + token
        gl.store(scale_ptr + at_scales, scale, mask=in_rows)
    gl.store(output_ptr + at_heads, values, mask=in_rows[:, None])


@gluon.jit
def attend_all(
    half: gl.constexpr, q_ring, k_ring, v_ring, released, outputs, sinks_ptr, scale_log2,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr,
    WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, PART: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """Attends the rows of one piece of work after another, as hopper_copies announces them."""
    q_tiles, notes, q_full, q_empty = q_ring
    SLOTS: gl.constexpr = q_full.shape[0]
    number = 0
    num_tiles = 0
    mbarrier.wait(q_full.index(0), 0)
    first = _read(notes, 0)
    end = _read(notes, 1)
    while first < end:
        slot = number % SLOTS
        kv_head = _read(notes, slot * NUM_NOTES + 2)
        query_start = _read(notes, slot * NUM_NOTES + 3)
        num_queries = _read(notes, slot * NUM_NOTES + 4)
        num_cached = _read(notes, slot * NUM_NOTES + 5)
        first_query = _read(notes, slot * NUM_NOTES + 6)
        q = q_tiles.index(2 * slot + half)
        acc, num_tiles = _attend(
            half, q, k_ring, v_ring, released, num_tiles, first, end, num_cached + first_query,
            sinks_ptr + kv_head * GROUP, scale_log2, GROUP, PADDED_GROUP, WINDOW, HAS_SINKS, PART,
            SETS,
        )  # fmt: skip
        q.store(acc.to(q.dtype))
        _write(
            half, q, outputs, query_start, first_query, num_queries, kv_head,
            NUM_KV_HEADS, GROUP, PADDED_GROUP,
        )  # fmt: skip
        # The copy engine writes there next.
        fence_async_shared()
        mbarrier.arrive(q_empty.index(slot), count=1)
        number += 1
        slot = number % SLOTS
        mbarrier.wait(q_full.index(slot), number // SLOTS & 1)
        first = _read(notes, slot * NUM_NOTES)
        end = _read(notes, slot * NUM_NOTES + 1)
