"""A warpgroup of hopper_attention: products and softmax of half of a tile's rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from models.kernels.attention.configurations import LANES
from models.kernels.attention.online_softmax import MARGIN
from models.kernels.attention.prefill.hopper_copies import is_packed, num_notes, rows_of_token
from models.kernels.attention.prefill.hopper_results import ROWS, write_part, write_rows
from models.kernels.launching.dependent_launch import wait_for_previous
from models.operands.base_two import LOG2_E

_LOG2_E = gl.constexpr(LOG2_E)
_MARGIN = gl.constexpr(MARGIN)
_LANES = gl.constexpr(LANES)


@gluon.jit
def _read(notes, place):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(notes.index(place).load(layout), 0)


@gluon.jit
def _whole_power(exponent, dtype: gl.constexpr):
    """Has the bits of online_softmax.whole_power."""
    return gl.floor(exponent) + (_MARGIN + 1 if dtype == gl.bfloat16 else 1)


@gluon.jit
def _before_keys(
    head, is_first, sinks_ptr, layout: gl.constexpr, DTYPE: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """Returns the highest score and the total of rows before they see any key."""
    highest = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    if form.has_sinks:
        # Scores without keys count as if seen first.
        sinks = gl.load(sinks_ptr + head, mask=head < form.group, other=0.0).to(gl.float32)
        if form.part > 0:
            highest = _whole_power(sinks * _LOG2_E, DTYPE)
            total = gl.exp2(gl.fma(sinks, _LOG2_E, -highest))
        else:
            highest = sinks * _LOG2_E
            total = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, layout))
            if is_first is not None:
                # Of several parts of the keys the first one has the sink.
                highest = gl.where(is_first, highest, -1e30)
                total = gl.where(is_first, total, 0.0)
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
def _halves(x):
    """Returns the first and the last half of a matrix's columns, which stay where they are."""
    HALF: gl.constexpr = x.shape[1] // 2
    return x.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()


@gluon.jit
def _add_weights(totals, weights):
    """Has the bits of online_softmax's function."""
    if weights.shape[1] == _LANES:
        totals += gl.convert_layout(weights, totals.type.layout)
    else:
        first, last = _halves(weights)
        totals = _add_weights(_add_weights(totals, first), last)
    return totals


@gluon.jit
def _add_lanes(totals, layout: gl.constexpr):
    """Has the bits of online_softmax's function."""
    sums = gl.sum(totals.reshape([ROWS, 2, 4, 2]), 3)
    return gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), gl.SliceLayout(1, layout))


@gluon.jit
def _weigh(
    scores, highest, total, first_key, first_position, positions, scale_log2, DTYPE: gl.constexpr,
    WINDOW: gl.constexpr, IS_EXACT: gl.constexpr,
):  # fmt: skip
    """Returns the weights of one tile of keys, the factor of earlier ones, highest and total.

    Has the bits of online_softmax.weigh_keys. The weights are in the register layout that tensor
    cores take them in.
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
    new_highest = gl.max(scores, 1) * scale_log2
    if IS_EXACT:
        new_highest = _whole_power(new_highest, DTYPE)
    new_highest = gl.maximum(highest, new_highest)
    weights = gl.exp2(gl.fma(scores, scale_log2, -new_highest[:, None]))
    kept = gl.exp2(highest - new_highest)
    if IS_EXACT:
        kept_sums = gl.convert_layout(kept, gl.SliceLayout(1, total.type.layout))
        total = _add_weights(total * kept_sums[:, None], weights)
    else:
        total = gl.fma(total, kept, gl.sum(weights, 1))
    operand = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, layout, 2))
    return operand, kept, new_highest, total


@gluon.jit
def _attend_keys(
    q, scores, highest, total, k_ring, v_ring, released, num_tiles, first, last, end,
    first_position, positions, scale_log2, WINDOW: gl.constexpr, IS_EXACT: gl.constexpr,
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
            q.dtype, WINDOW, IS_EXACT,
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
            # The old ones would live on beside the next ones, in as many registers again.
            scores = gl.zeros([ROWS, KEYS], gl.float32, scores_layout)
    return acc, highest, total, scores, num_tiles


@gluon.jit
def _fold(sums, kept, part, weight):
    """Adds a part's sums to those of earlier parts; invariant_parts.merge has the same bits."""
    layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    part = gl.convert_layout(part, sums.type.layout)
    if weight is not None:
        part *= gl.convert_layout(weight, layout)[:, None]
    return gl.fma(sums, gl.convert_layout(kept, layout)[:, None], part)


@gluon.jit
def _attend_parts(
    q, scores, highest, total, k_ring, v_ring, released, spare, num_tiles, first, end,
    first_position, positions, scale_log2, form: gl.constexpr,
):  # fmt: skip
    """Does what _attend_keys does, with sums of their own for parts of the keys by position.

    Registers hold one half of the sums of earlier parts, `spare` the other.
    """
    HEAD_DIM: gl.constexpr = v_ring[0].shape[2]
    # Else a part is relative to the powers of earlier parts, which saves work and changes no bit.
    # Relative to a sink, which has no values, all weights could vanish.
    HAS_OWN_POWERS: gl.constexpr = q.dtype != gl.bfloat16 or form.has_sinks
    layout: gl.constexpr = scores.type.layout
    lanes: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _LANES, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM // 2, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    low = gl.zeros([ROWS, HEAD_DIM // 2], gl.float32, half)
    high = low
    if spare is not None:
        spare.store(low)
    for part in range(first // form.part, (end + form.part - 1) // form.part):
        before = highest
        if HAS_OWN_POWERS:
            highest = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, layout))
        acc, highest, totals, scores, num_tiles = _attend_keys(
            q, scores, highest, gl.zeros([ROWS, _LANES], gl.float32, lanes), k_ring, v_ring,
            released, num_tiles, gl.maximum(part * form.part, first),
            gl.minimum((part + 1) * form.part, end), end, first_position, positions, scale_log2,
            form.window, True,
        )  # fmt: skip
        part_total = _add_lanes(totals, layout)
        weight = None
        if HAS_OWN_POWERS:
            part_highest = highest
            highest = gl.maximum(before, part_highest)
            weight = gl.exp2(part_highest - highest)
            part_total *= weight
        kept = gl.exp2(before - highest)
        total = gl.fma(total, kept, part_total)
        part_low, part_high = _halves(acc)
        low = _fold(low, kept, part_low, weight)
        if spare is None:
            high = _fold(high, kept, part_high, weight)
        else:
            spare.store(_fold(spare.load(half), kept, part_high, weight))
    if spare is not None:
        high = spare.load(half)
    acc = gl.join(low, high).permute((0, 2, 1)).reshape([ROWS, HEAD_DIM])
    return gl.convert_layout(acc, acc_layout), total, num_tiles


@gluon.jit
def _attend(
    half: gl.constexpr, q, k_ring, v_ring, released, spares, num_tiles, first, end, first_position,
    is_first, sinks_ptr, scale_log2, form: gl.constexpr,
):  # fmt: skip
    """Returns the attention of a warpgroup's rows to the keys in [first, end), and num_tiles.

    is_first: whether these are a tile's first keys; None: they are all. Unless None, the base-2
    logarithms of the sums of exponentials are beside the attention. num_tiles counts tiles of keys.
    form.part > 0: each part of form.part keys, by position, has a softmax of its own.
    """
    KEYS: gl.constexpr = v_ring[0].shape[1]
    STAGES: gl.constexpr = v_ring[0].shape[0]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    rows = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
    HEADS: gl.constexpr = rows_of_token(form.group)
    positions = first_position + rows // HEADS
    highest, total = _before_keys(rows % HEADS, is_first, sinks_ptr, scores_layout, q.dtype, form)
    scores = warpgroup_mma_wait(0, [_score(q, k_ring, num_tiles, scores_layout)])
    mbarrier.arrive(released.index(num_tiles % STAGES), count=1)
    if form.part == 0:
        acc, highest, total, scores, num_tiles = _attend_keys(
            q, scores, highest, total, k_ring, v_ring, released, num_tiles, first, end, end,
            first_position, positions, scale_log2, form.window, False,
        )  # fmt: skip
    else:
        spare = None
        if spares[0] is not None:
            spare = spares[0].index(half)
        acc, total, num_tiles = _attend_parts(
            q, scores, highest, total, k_ring, v_ring, released, spare, num_tiles, first, end,
            first_position, positions, scale_log2, form,
        )  # fmt: skip
    if is_first is not None:
        # A row may see no key of a part; its lse is that of a row that sees none at all.
        total = gl.where(total > 0.0, total, 1.0)
    mean = acc / gl.convert_layout(total, gl.SliceLayout(1, acc.type.layout))[:, None]
    results = (mean,)
    if is_first is not None:
        results = (mean, highest + gl.log2(total))  # type: ignore[assignment]
    return results, num_tiles


@gluon.jit
def attend_all(
    half: gl.constexpr, q_ring, k_ring, v_ring, released, spares, outputs, parts, sinks_ptr,
    scale_log2, form: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Attends the rows of one piece of work after another, as hopper_copies announces them."""
    q_tiles, notes, q_full, q_empty = q_ring
    SLOTS: gl.constexpr = q_full.shape[0]
    IS_SHARED: gl.constexpr = parts is not None
    NUM_NOTES: gl.constexpr = num_notes(IS_SHARED)
    number = 0
    num_tiles = 0
    wait_for_previous(DEPENDENT)
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
        if is_packed(form.group):
            # Its lanes copied the queries, which tensor cores read as the copy engine writes.
            fence_async_shared()
        is_first = None
        if IS_SHARED:
            is_first = _read(notes, slot * NUM_NOTES + 7) == 0
        results, num_tiles = _attend(
            half, q, k_ring, v_ring, released, spares, num_tiles, first, end,
            num_cached + first_query, is_first, sinks_ptr + kv_head * form.group, scale_log2, form,
        )  # fmt: skip
        num_parts = 1
        if IS_SHARED:
            # Read now, not kept beside sums.
            num_parts = _read(notes, slot * NUM_NOTES + 8)
        if IS_SHARED and num_parts > 1:
            part = _read(notes, slot * NUM_NOTES + 7)
            place = _read(notes, slot * NUM_NOTES + 9)
            write_part(
                half, results, parts, place, num_parts, part, num_queries - first_query, form
            )
        else:
            q.store(results[0].to(q.dtype))
            write_rows(
                half, q, outputs, query_start, first_query, num_queries, kv_head, form,
            )  # fmt: skip
        # The copy engine writes there next.
        fence_async_shared()
        mbarrier.arrive(q_empty.index(slot), count=1)
        number += 1
        slot = number % SLOTS
        mbarrier.wait(q_full.index(slot), number // SLOTS & 1)
        first = _read(notes, slot * NUM_NOTES)
        end = _read(notes, slot * NUM_NOTES + 1)
