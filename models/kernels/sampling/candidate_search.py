"""Finds the cut of a row with many candidates and draws from the rest; used by sample_tokens.

A candidate is a token's id and its depth: how far its logit is below the row's largest, as the bits
of a float32, which have the same order.
"""

import triton
import triton.language as tl

from models.kernels.sampling.token_weights import weights_at
from models.operands.draws import MAX_HALVINGS

ANY_DEPTH = tl.constexpr(2**31 - 1)
DEPTH_UNIT = tl.constexpr(1 << 30)
DEPTH_DIGITS = tl.constexpr(16)
"""A depth's bits, two to a digit."""

_MAX_HALVINGS = tl.constexpr(MAX_HALVINGS)
_BINS_PER_HALVING = tl.constexpr(16.0)
NUM_BINS = 1024
"""Covers more than 60 halvings, beyond which tokens weigh nothing."""


@triton.jit
def depth_bits(largest, logits):
    """Returns how far logits are below the largest, as integers of the same order."""
    return (largest - logits).to(tl.int32, bitcast=True)


@triton.jit
def bin_of(depths, scale):
    """Returns the bin of a depth; deeper ones never have a lower bin."""
    halvings = depths.to(tl.float32, bitcast=True) * scale
    halvings = tl.where(halvings < _MAX_HALVINGS, halvings, _MAX_HALVINGS)
    return (halvings * _BINS_PER_HALVING).to(tl.int32)


@triton.jit
def digit(before_1, before_2, before_3, goal):
    """Returns two bits of a key: the number of pivots before which a sum is below a goal."""
    first_two = (before_1 < goal).to(tl.uint32) + (before_2 < goal).to(tl.uint32)
    return first_two + (before_3 < goal).to(tl.uint32)


@triton.jit
def candidates(logits_ptr, ids_ptr, depths_ptr, at, count, is_whole, largest):
    """Returns ids and depth bits of candidates, or of the row's tokens if `is_whole`."""
    exists = at < count
    ids = tl.load(ids_ptr + at, mask=exists & (is_whole == 0), other=0)
    depths = tl.load(depths_ptr + at, mask=exists & (is_whole == 0), other=ANY_DEPTH)
    logits = tl.load(logits_ptr + at, mask=exists & is_whole, other=float("-inf"))
    depths = tl.where(is_whole, depth_bits(largest, logits.to(tl.float32)), depths)
    return tl.where(is_whole, at, ids), tl.where(exists, depths, ANY_DEPTH), exists


@triton.jit
def sum_up_to(
    logits_ptr, ids_ptr, depths_ptr, count, is_whole, largest, scale, cut, lightest,
    pivot_1, pivot_2, pivot_3,
    BY_ID: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the sums of the candidates before each pivot: their number or their weights.

    Pivots are ids or depth bits. Candidates deeper than the cut or too light do not count.
    """
    sum_1 = tl.zeros((BLOCK,), tl.int64)
    sum_2 = tl.zeros((BLOCK,), tl.int64)
    sum_3 = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids, depths, exists = candidates(
            logits_ptr, ids_ptr, depths_ptr, at, count, is_whole, largest
        )
        if COUNTS:
            amounts = exists.to(tl.int64)
        else:
            amounts = weights_at(depths.to(tl.float32, bitcast=True), scale)
            amounts = tl.where(exists & (depths <= cut) & (amounts >= lightest), amounts, 0)
        keys = (ids if BY_ID else depths).to(tl.uint32, bitcast=True)
        sum_1 += tl.where(keys < pivot_1, amounts, 0)
        sum_2 += tl.where(keys < pivot_2, amounts, 0)
        sum_3 += tl.where(keys < pivot_3, amounts, 0)
    return tl.sum(sum_1, 0), tl.sum(sum_2, 0), tl.sum(sum_3, 0)


@triton.jit
def first_to_reach(
    goal, logits_ptr, ids_ptr, depths_ptr, count, is_whole, largest, scale, cut, lightest,
    FIRST_UNIT: tl.constexpr, NUM_DIGITS: tl.constexpr,
    BY_ID: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the smallest key at which the sum of candidates up to it reaches the goal."""
    found = tl.full((), 0, tl.uint32)
    unit = tl.full((), FIRST_UNIT, tl.uint32)
    for _ in range(NUM_DIGITS):
        before_1, before_2, before_3 = sum_up_to(
            logits_ptr, ids_ptr, depths_ptr, count, is_whole, largest, scale, cut, lightest,
            found + unit, found + 2 * unit, found + 3 * unit, BY_ID, COUNTS, BLOCK,
        )  # fmt: skip
        found += digit(before_1, before_2, before_3, goal) * unit
        unit = unit >> 2
    return found.to(tl.int32, bitcast=True)


@triton.jit
def gather_bin(
    logits_ptr, ids_ptr, depths_ptr, wanted, largest, scale,
    SIZE: tl.constexpr, MAX_CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes a row's tokens of one bin its candidates; returns their number, even if not all fit."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, SIZE, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        exists = tokens < SIZE
        logits = tl.load(logits_ptr + tokens, mask=exists, other=float("-inf"))
        depths = depth_bits(largest, logits.to(tl.float32))
        is_wanted = exists & (bin_of(depths, scale) == wanted)
        ones = is_wanted.to(tl.int32)
        num_found = tl.sum(ones, 0)
        if num_found > 0:
            at = count + tl.cumsum(ones, 0) - 1
            is_kept = is_wanted & (at < MAX_CANDIDATES)
            tl.store(ids_ptr + at, tokens, mask=is_kept)
            tl.store(depths_ptr + at, depths, mask=is_kept)
        count += num_found
    # Other threads read these stores next.
    tl.debug_barrier()
    return count


@triton.jit
def kept_chunk_weights(
    logits_ptr, chunks, largest, scale, cut, lightest,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, CHUNK_BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the weight of the kept tokens of each of a row's chunks."""
    kept = tl.zeros((CHUNK_BLOCK,), tl.int64)
    for start in range(0, SIZE, CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        logits = tl.load(logits_ptr + tokens, mask=tokens < SIZE, other=float("-inf"))
        depths = largest - logits.to(tl.float32)
        weights = weights_at(depths, scale)
        is_kept = (depths.to(tl.int32, bitcast=True) <= cut) & (weights >= lightest)
        total = tl.sum(tl.where(is_kept, weights, 0), 0)
        kept = tl.where(chunks == start // CHUNK, total, kept)
    return kept


@triton.jit
def draw_among_few(
    ids_ptr, depths_ptr, count, top_k, top_p, total, u, scale, lightest,
    SIZE: tl.constexpr, FEW: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Does what `find_cut` and `draw_among` do for up to FEW candidates."""
    at = tl.arange(0, FEW)
    exists = at < count
    ids = tl.load(ids_ptr + at, mask=exists, other=SIZE)
    depths = tl.load(depths_ptr + at, mask=exists, other=ANY_DEPTH)
    weights = tl.where(exists, weights_at(depths.to(tl.float32, bitcast=True), scale), 0)
    num_before = tl.zeros((FEW,), tl.int32)
    weight_before = tl.zeros((FEW,), tl.int64)
    for start in range(0, count, STEP):
        other = start + tl.arange(0, STEP)
        other_depths = tl.load(depths_ptr + other, mask=other < count, other=ANY_DEPTH)
        other_weights = weights_at(other_depths.to(tl.float32, bitcast=True), scale)
        is_before = other_depths[None, :] < depths[:, None]
        num_before += tl.sum(is_before.to(tl.int32), 1)
        weight_before += tl.sum(tl.where(is_before, other_weights[None, :], 0), 1)
    has_top_k = (top_k > 0) & (top_k < SIZE)
    is_kept = exists & (num_before < tl.where(has_top_k, top_k, SIZE))
    total = tl.where(has_top_k, tl.sum(tl.where(is_kept, weights, 0), 0), total)
    nucleus = tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    is_kept &= weight_before < tl.where(top_p < 1.0, nucleus, total + 1)
    cut = tl.max(tl.where(is_kept, depths, -1), 0)
    weights = tl.where(is_kept & (weights >= lightest), weights, 0)
    threshold = (u * tl.sum(weights, 0).to(tl.float64)).to(tl.int64)
    reached = tl.zeros((FEW,), tl.int64)
    for start in range(0, count, STEP):
        other = start + tl.arange(0, STEP)
        other_ids = tl.load(ids_ptr + other, mask=other < count, other=SIZE)
        other_depths = tl.load(depths_ptr + other, mask=other < count, other=ANY_DEPTH)
        other_weights = weights_at(other_depths.to(tl.float32, bitcast=True), scale)
        counts = (other_depths <= cut) & (other_weights >= lightest)
        counts = counts[None, :] & (other_ids[None, :] <= ids[:, None])
        reached += tl.sum(tl.where(counts, other_weights[None, :], 0), 1)
    # Broken logits weigh nothing, yet the token must exist.
    return tl.min(tl.where(exists & (reached > threshold), ids, SIZE - 1), 0)


@triton.jit
def find_cut(
    logits_ptr, ids_ptr, depths_ptr, histogram_ptr, count, is_whole, top_k, top_p, total,
    largest, scale,
    SIZE: tl.constexpr, MAX_CANDIDATES: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the largest depth that top-k and then top-p keep.

    `total` is the weight of the row; top-p applies to the weight that top-k leaves. If the whole
    row is searched, the weights of bins show which bin has the cut of top-p.
    """
    cut = tl.full((), ANY_DEPTH, tl.int32)
    none = tl.full((), 0, tl.int64)
    end = tl.full((), 2**32 - 1, tl.uint32)
    has_top_k = (top_k > 0) & (top_k < SIZE)
    if has_top_k:
        if top_k < count:
            cut = first_to_reach(
                top_k, logits_ptr, ids_ptr, depths_ptr, count, is_whole, largest, scale, cut, none,
                DEPTH_UNIT, DEPTH_DIGITS, False, True, BLOCK,
            )  # fmt: skip
        if top_p < 1.0:
            total, _, _ = sum_up_to(
                logits_ptr, ids_ptr, depths_ptr, count, is_whole, largest, scale, cut, none,
                end, end, end, False, False, BLOCK,
            )  # fmt: skip
    if top_p < 1.0:
        nucleus = (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        nucleus = tl.maximum(nucleus, 1)
        if is_whole & (has_top_k == 0):
            bins = tl.arange(0, BINS)
            histogram = tl.load(histogram_ptr + bins)
            wanted = tl.sum((tl.cumsum(histogram, 0) < nucleus).to(tl.int32), 0)
            num_found = gather_bin(
                logits_ptr, ids_ptr, depths_ptr, wanted, largest, scale,
                SIZE, MAX_CANDIDATES, BLOCK,
            )  # fmt: skip
            is_whole = num_found > MAX_CANDIDATES
            count = tl.where(is_whole, SIZE, num_found)
            before = tl.sum(tl.where(bins < wanted, histogram, 0), 0)
            nucleus = tl.where(is_whole, nucleus, nucleus - before)
        cut = first_to_reach(
            nucleus, logits_ptr, ids_ptr, depths_ptr, count, is_whole, largest, scale, cut, none,
            DEPTH_UNIT, DEPTH_DIGITS, False, False, BLOCK,
        )  # fmt: skip
    return cut


@triton.jit
def draw_among(
    logits_ptr, ids_ptr, depths_ptr, count, u, largest, scale, cut, lightest,
    SIZE: tl.constexpr, ID_UNIT: tl.constexpr, ID_DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the token drawn from the candidates that are kept."""
    end = tl.full((), 2**32 - 1, tl.uint32)
    kept, _, _ = sum_up_to(
        logits_ptr, ids_ptr, depths_ptr, count, count < 0, largest, scale, cut, lightest,
        end, end, end, True, False, BLOCK,
    )  # fmt: skip
    threshold = (u * kept.to(tl.float64)).to(tl.int64)
    token_id = first_to_reach(
        threshold + 1, logits_ptr, ids_ptr, depths_ptr, count, count < 0, largest, scale, cut,
        lightest, ID_UNIT, ID_DIGITS, True, False, BLOCK,
    )  # fmt: skip
    # Broken logits weigh nothing, yet the token must exist.
    return tl.minimum(token_id, SIZE - 1)
