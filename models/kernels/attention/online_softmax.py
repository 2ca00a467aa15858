"""The inner loop of the attention kernels: tiles of keys and values, softmax in one pass."""

import triton
import triton.language as tl

from models.kernels.attention.chunk_start import chunk_start
from models.kernels.attention.configurations import LANES
from models.operands.base_two import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)

MARGIN = 64
"""Weights that must be exact are at most 2^-MARGIN.

Their exponents, down to that of the smallest float32, have the same unit in the last place, 2^-17.
So they are rounded alike relative to any whole power of two.
"""
_LANES = tl.constexpr(LANES)
_MARGIN = tl.constexpr(MARGIN)


@triton.jit
def see_nothing(ROWS: tl.constexpr):
    """Returns highest and total of rows that have seen no key.

    Finite, as a dummy request sees no key and inf - inf is NaN.
    """
    return tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def see_sinks(sinks_ptr, heads, in_group):
    """Returns highest and total of rows that have seen their head's sink.

    A sink is a score without a key, as if it had been seen first.
    """
    sinks = tl.load(sinks_ptr + heads, mask=in_group, other=0.0)
    return sinks.to(tl.float32) * _LOG2_E, tl.full(heads.shape, 1.0, tl.float32)


@triton.jit
def soft_capped(scores, scale_log2, SOFT_CAP: tl.constexpr):
    """Returns SOFT_CAP * tanh(scaled score / SOFT_CAP), in units of base-2 exponents."""
    power = tl.exp2(scores * (scale_log2 * (2.0 / SOFT_CAP)))
    # As fma, which no compiler joins with a subtraction that follows: masks would decide that.
    return tl.fma(1.0 - 2.0 / (power + 1.0), SOFT_CAP * _LOG2_E, 0.0)


@triton.jit
def whole_power(exponent, dtype: tl.constexpr):
    """Returns the exponent of a power of two that weights of up to 2^exponent are relative to.

    Small weights in float16 would be zero; its bits depend on the tiles.
    """
    return tl.floor(exponent) + (_MARGIN + 1 if dtype == tl.bfloat16 else 1)


@triton.jit
def _add_weights(totals, weights):
    """Adds a tile's weights to [ROWS, LANES] sums, each key's after those of earlier keys."""
    if weights.shape[1] == _LANES:
        totals += weights
    else:
        halves = tl.reshape(weights, (weights.shape[0], 2, weights.shape[1] // 2))
        first, last = tl.split(tl.permute(halves, (0, 2, 1)))
        totals = _add_weights(_add_weights(totals, first), last)
    return totals


@triton.jit
def add_lanes(totals):
    """Returns each row's sum of [ROWS, LANES], in an order that all layouts have."""
    sums = tl.sum(tl.reshape(totals, (totals.shape[0], 2, _LANES // 4, 2)), 3)
    return tl.sum(tl.sum(sums, 2), 1)


@triton.jit
def weigh_keys(
    q, k, k_scale, highest, total, keys, end, positions, scale_log2,
    IS_DIAGONAL: tl.constexpr, WINDOW: tl.constexpr, HAS_SCALES: tl.constexpr,
    SOFT_CAP: tl.constexpr = 0.0, IS_EXACT: tl.constexpr = False, own=None,
):  # fmt: skip
    """Returns the weights of one tile of keys, the factor of earlier ones, highest and total.

    highest and total are each row's highest scaled score and sum of base-2 exponentials so far. On
    the diagonal a row sees keys up to its position and before the end, and with a WINDOW only the
    last WINDOW of them or, if negative, those of its chunk; off it, all rows see all keys. Where
    rows see keys after their own, own is each row's position, from which the WINDOW counts.
    HAS_SCALES: scores are multiplied by the scales of k's heads, [1, KEYS]. SOFT_CAP: of scaled
    scores; 0 for none.

    IS_EXACT: weights are relative to a whole power of two, highest is its exponent, and total is
    [ROWS, LANES]. Changing the power multiplies exactly, so a row's bits do not depend on the tile
    that its highest score is in. hopper_softmax has the same bits.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_SCALES:
        scores *= k_scale
    if SOFT_CAP > 0.0:
        scores = soft_capped(scores, scale_log2, SOFT_CAP)
        scale_log2 = 1.0
    if IS_DIAGONAL:
        is_seen = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
        if WINDOW > 0:
            from_ = positions if own is None else own
            is_seen = is_seen & (keys[None, :] > from_[:, None] - WINDOW)
        elif WINDOW < 0:
            from_ = positions if own is None else own
            is_seen = is_seen & (keys[None, :] >= chunk_start(from_, WINDOW)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    # Scaled after the maximum, so that scaling and subtraction are one instruction. As fma, which
    # leaves the compiler no choice of rounding.
    new_highest = tl.max(scores, 1) * scale_log2
    if IS_EXACT:
        new_highest = whole_power(new_highest, q.dtype)
    new_highest = tl.maximum(highest, new_highest)
    if WINDOW != 0:
        # A row may see no key of its first tiles; a finite number avoids inf - inf.
        new_highest = tl.where(new_highest == float("-inf"), -1e30, new_highest)
    weights = tl.exp2(tl.fma(scores, scale_log2, -new_highest[:, None]))
    kept = tl.exp2(highest - new_highest)
    if IS_EXACT:
        total = _add_weights(total * kept[:, None], weights)
    else:
        total = tl.fma(total, kept, tl.sum(weights, 1))
    return weights, kept, new_highest, total


@triton.jit
def fold_tile(
    q, k, v, k_scale, v_scale, acc, highest, total, keys, end, positions, scale_log2,
    IS_DIAGONAL: tl.constexpr, WINDOW: tl.constexpr, HAS_SCALES: tl.constexpr,
    SOFT_CAP: tl.constexpr = 0.0, IS_EXACT: tl.constexpr = False, own=None,
):  # fmt: skip
    """Folds one tile of keys and values of one kv head into a running softmax: weigh_keys.

    acc holds the weighted values of each row of q so far. HAS_SCALES: weights are multiplied by
    v_scale.
    """
    weights, kept, highest, total = weigh_keys(
        q, k, k_scale, highest, total, keys, end, positions, scale_log2,
        IS_DIAGONAL, WINDOW, HAS_SCALES, SOFT_CAP, IS_EXACT, own,
    )  # fmt: skip
    if HAS_SCALES:
        weights *= v_scale
    acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    return acc, highest, total


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Converts FP8 to another dtype, exactly.

    To bfloat16 it goes by float32: a multiprocessor runs these instructions at a higher rate than
    the direct one from float16 to bfloat16.
    """
    x = x.to(tl.float16)
    if dtype == tl.bfloat16:
        return x.to(tl.float32).to(tl.bfloat16)
    return x.to(dtype)


@triton.jit
def load_keys(first, end, table_ptr, cache, kv_head, dims, form: tl.constexpr):
    """Returns the held_keys cached keys and values of one kv head from `first`, zeros from `end`.

    form: DecodeForm.
    """
    keys = first + tl.arange(0, form.held_keys)
    is_key = keys < end
    block = tl.load(table_ptr + keys // form.block_size, mask=is_key, other=0).to(tl.int64)
    slot = (block * form.block_size + keys % form.block_size) * form.num_kv_heads + kv_head
    in_keys = is_key[:, None] & (dims < form.head_dim)[None, :]
    at_keys = slot[:, None] * form.head_dim + dims[None, :]
    k = tl.load(cache.k + at_keys, mask=in_keys, other=0.0)
    v = tl.load(cache.v + at_keys, mask=in_keys, other=0.0)
    return k, v


@triton.jit
def attend_keys(
    q, acc, highest, total, start, end, positions, table_ptr, cache, kv_head, dims, scale_log2,
    IS_DIAGONAL: tl.constexpr, WINDOW: tl.constexpr, form: tl.constexpr,
    IS_EXACT: tl.constexpr = False, own=None,
):  # fmt: skip
    """Folds the cached keys in [start, end) of one kv head into a running softmax: fold_tile.

    Off the diagonal end - start is a multiple of form.keys. form: has num_kv_heads, head_dim,
    block_size, keys, stages, has_scales and soft_cap of DecodeForm.
    """
    for first in tl.range(start, end, form.keys, num_stages=form.stages):
        keys = first + tl.arange(0, form.keys)
        in_keys = (dims < form.head_dim)[None, :]
        if IS_DIAGONAL:
            is_key = keys < end
            block = tl.load(table_ptr + keys // form.block_size, mask=is_key, other=0).to(tl.int64)
            in_keys = is_key[:, None] & in_keys
        else:
            block = tl.load(table_ptr + keys // form.block_size).to(tl.int64)
        slot = (block * form.block_size + keys % form.block_size) * form.num_kv_heads + kv_head
        at_keys = slot[:, None] * form.head_dim + dims[None, :]
        k = tl.load(cache.k + at_keys, mask=in_keys, other=0.0)
        v = tl.load(cache.v + at_keys, mask=in_keys, other=0.0)
        if form.has_scales:
            k, v = widened(k, q.dtype), widened(v, q.dtype)
        k_scale, v_scale = 1.0, 1.0
        if form.has_scales:
            k_scale = tl.load(cache.k_scale + slot, mask=keys < end, other=0.0)[None, :]
            v_scale = tl.load(cache.v_scale + slot, mask=keys < end, other=0.0)[None, :]
        acc, highest, total = fold_tile(
            q, k, v, k_scale, v_scale, acc, highest, total, keys, end, positions, scale_log2,
            IS_DIAGONAL, WINDOW, form.has_scales, form.soft_cap, IS_EXACT, own,
        )  # fmt: skip
    return acc, highest, total


@triton.jit
def attend_new_keys(
    q, acc, highest, total, start, end, positions, new, first_token, kv_head, scale_log2,
    IS_DIAGONAL: tl.constexpr, WINDOW: tl.constexpr, form: tl.constexpr, own=None,
):  # fmt: skip
    """Folds the keys in [start, end) of a chunk, which begins at first_token: fold_tile.

    Keys are rows of tensors, read in whole tiles. Positions count from the chunk's first token.
    new: NewKeys of prefill_attention, form: its PrefillForm.
    """
    k_column = kv_head * new.k_stride
    v_column = kv_head * new.v_stride
    for first in tl.range(start, end, form.keys, num_stages=form.stages):
        keys = first + tl.arange(0, form.keys)
        k = new.k.load([first_token + first, k_column])
        v = new.v.load([first_token + first, v_column])
        if IS_DIAGONAL:
            # After the chunk come other requests' values, which may be NaN: 0 * NaN is NaN.
            v = tl.where((keys < end)[:, None], v, 0.0)
        acc, highest, total = fold_tile(
            q, k, v, 1.0, 1.0, acc, highest, total, keys, end, positions, scale_log2,
            IS_DIAGONAL, WINDOW, False, form.soft_cap, False, own,
        )  # fmt: skip
    return acc, highest, total
