"""Draws tokens from truncated distributions in four kernels, each of which skips work.

1. Group maxima: reads every logit once.
2. Plan, one program per row: the row's largest logit, and with top-k or top-p a bound below which
   no token is kept.
3. Gather, one program per chunk and row: the row's weight by chunk, and with top-k or top-p the
   tokens above the bound, in any order. Skips chunks without such tokens if weights are not needed.
4. Choose, one program per row: narrows the bound to the exact cut and draws.

Step 4 compares few candidates, as after top-k, each with each. Of many it finds the bits of the cut
and of the token's id, two at a time, from sums of weights below a pivot. If there are more than
fit, as with top-p over flat logits, a histogram of weights limits the search to one bin. Nothing is
sorted.
"""

import torch
import triton
import triton.language as tl

from models.kernels.sampling.candidate_search import (
    ANY_DEPTH,
    DEPTH_DIGITS,
    DEPTH_UNIT,
    NUM_BINS,
    bin_of,
    depth_bits,
    digit,
    draw_among,
    draw_among_few,
    find_cut,
    kept_chunk_weights,
)
from models.kernels.sampling.group_maxima import CHUNK, GROUP, group_maxima
from models.kernels.sampling.token_weights import scale_of, uniform_of, weights_at
from models.operands.draws import NO_TOKEN, WEIGHT_BITS

_MAX_CANDIDATES = 16384
"""Candidates of a row that fit; if there are more, those near the cut are found later."""

_BLOCK = 1024
_FEW = 256
"""Most candidates that are compared with each other, which beats a search."""

_FEW_STEP = 32
_LARGEST = tl.constexpr(2**WEIGHT_BITS)

_NOT_SPECIALIZED = [
    "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr",
]  # fmt: skip


@triton.jit
def _is_truncated(top_k, top_p, SIZE: tl.constexpr):
    return ((top_k > 0) & (top_k < SIZE)) | (top_p < 1.0)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _plan_kernel(
    maxima_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    largest_ptr, depth_bound_ptr, weight_bound_ptr, num_candidates_ptr, histograms_ptr,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    groups = tl.arange(0, BLOCK)
    maxima = tl.load(maxima_ptr + row * GROUPS + groups, mask=groups < GROUPS, other=float("-inf"))
    largest = tl.max(maxima, 0)
    tl.store(largest_ptr + row, largest)
    tl.store(num_candidates_ptr + row, 0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if (temperature > 0) & _is_truncated(top_k, top_p, SIZE):
        depth_bound = tl.full((), ANY_DEPTH, tl.int32)
        weight_bound = tl.full((), 1, tl.int64)
        depths = depth_bits(largest, maxima).to(tl.uint32, bitcast=True)
        if (top_k > 0) & (top_k < SIZE):
            # k groups have k tokens that are at least as large as the k-th largest maximum.
            if top_k <= GROUPS:
                found = tl.full((), 0, tl.uint32)
                unit = tl.full((), DEPTH_UNIT, tl.uint32)
                for _ in range(DEPTH_DIGITS):
                    below_1 = tl.sum((depths < found + unit).to(tl.int32), 0)
                    below_2 = tl.sum((depths < found + 2 * unit).to(tl.int32), 0)
                    below_3 = tl.sum((depths < found + 3 * unit).to(tl.int32), 0)
                    found += digit(below_1, below_2, below_3, top_k) * unit
                    unit = unit >> 2
                depth_bound = found.to(tl.int32, bitcast=True)
        else:
            # All tokens lighter than this together weigh less than top-p drops.
            weights = weights_at(largest - maxima, scale_of(temperature))
            left_out = (1.0 - top_p.to(tl.float64)) * tl.sum(weights, 0).to(tl.float64)
            weight_bound = tl.maximum((0.99 * left_out / SIZE).to(tl.int64), weight_bound)
            tl.store(histograms_ptr + row * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int64))
        tl.store(depth_bound_ptr + row, depth_bound)
        tl.store(weight_bound_ptr + row, weight_bound)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _gather_kernel(
    logits_ptr, maxima_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    largest_ptr, depth_bound_ptr, weight_bound_ptr, num_candidates_ptr,
    histograms_ptr, chunk_weights_ptr, candidate_ids_ptr, candidate_depths_ptr,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, PER_CHUNK: tl.constexpr, CHUNK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    is_truncated = _is_truncated(top_k, top_p, SIZE)
    has_top_k = (top_k > 0) & (top_k < SIZE)
    largest = tl.load(largest_ptr + row)
    depth_bound = tl.full((), ANY_DEPTH, tl.int32)
    if is_truncated:
        depth_bound = tl.load(depth_bound_ptr + row)
    groups = chunk * PER_CHUNK + tl.arange(0, PER_CHUNK)
    nearest = depth_bits(largest, tl.max(tl.load(maxima_ptr + row * GROUPS + groups), 0))
    if (temperature > 0) & ((nearest <= depth_bound) | (has_top_k == 0)):
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = tl.load(logits_ptr + row * SIZE + tokens, mask=tokens < SIZE, other=float("-inf"))
        logits = logits.to(tl.float32)
        scale = scale_of(temperature)
        weights = weights_at(largest - logits, scale)
        if is_truncated:
            tl.store(chunk_weights_ptr + row * tl.num_programs(0) + chunk, tl.sum(weights, 0))
            depths = depth_bits(largest, logits)
            is_candidate = depths <= depth_bound
            is_candidate &= (weights >= tl.load(weight_bound_ptr + row)) & (tokens < SIZE)
            ones = is_candidate.to(tl.int32)
            num_found = tl.sum(ones, 0)
            if num_found > 0:
                first = tl.atomic_add(num_candidates_ptr + row, num_found)
                at = first + tl.cumsum(ones, 0) - 1
                is_kept = is_candidate & (at < MAX_CANDIDATES)
                at = row * MAX_CANDIDATES + at
                tl.store(candidate_ids_ptr + at, tokens, mask=is_kept)
                tl.store(candidate_depths_ptr + at, depths, mask=is_kept)
                if has_top_k == 0:
                    bins = histograms_ptr + row * BINS + bin_of(depths, scale)
                    tl.atomic_add(bins, weights, mask=is_candidate, sem="relaxed")
        else:
            lightest = (tl.load(min_p_ptr + row).to(tl.float64) * _LARGEST).to(tl.int64)
            weights = tl.where(weights >= lightest, weights, 0)
            tl.store(chunk_weights_ptr + row * tl.num_programs(0) + chunk, tl.sum(weights, 0))


@triton.jit
def _choose_greedily(logits_ptr, maxima, groups, largest, SIZE: tl.constexpr, GROUP: tl.constexpr):
    group = tl.min(tl.where(maxima == largest, groups, SIZE // GROUP), 0)
    tokens = group * GROUP + tl.arange(0, GROUP)
    logits = tl.load(logits_ptr + tokens, mask=tokens < SIZE, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(logits == largest, tokens, SIZE - 1), 0)


@triton.jit
def _choose_in_chunks(
    logits_ptr, chunk_weights, chunks, u, largest, scale, cut, lightest,
    SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Draws from the row's chunks: first the chunk, then a token in it."""
    total = tl.sum(chunk_weights, 0)
    threshold = (u * total.to(tl.float64)).to(tl.int64)
    reached = tl.cumsum(chunk_weights, 0)
    chunk = tl.sum((reached <= threshold).to(tl.int32), 0)
    threshold -= tl.sum(tl.where(chunks < chunk, chunk_weights, 0), 0)
    tokens = tl.arange(0, CHUNK)
    at = chunk * CHUNK + tokens
    logits = tl.load(logits_ptr + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
    weights = weights_at(largest - logits, scale)
    is_kept = (depth_bits(largest, logits) <= cut) & (weights >= lightest)
    weights = tl.where(is_kept, weights, 0)
    inside = tl.sum((tl.cumsum(weights, 0) <= threshold).to(tl.int32), 0)
    return tl.minimum(chunk * CHUNK + inside, SIZE - 1)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _choose_kernel(
    logits_ptr, maxima_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seeds_ptr, positions_ptr, largest_ptr, num_candidates_ptr,
    histograms_ptr, chunk_weights_ptr, candidate_ids_ptr, candidate_depths_ptr, token_ids_ptr,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, CHUNK_BLOCK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr, FEW: tl.constexpr, FEW_STEP: tl.constexpr, BLOCK: tl.constexpr,
    ID_UNIT: tl.constexpr, ID_DIGITS: tl.constexpr, BINS: tl.constexpr, NO_TOKEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * SIZE
    largest = tl.load(largest_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0:
        groups = tl.arange(0, GROUP_BLOCK)
        maxima = tl.load(
            maxima_ptr + row * GROUPS + groups, mask=groups < GROUPS, other=float("-inf")
        )
        token_id = _choose_greedily(logits_ptr, maxima, groups, largest, SIZE, GROUP)
    else:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        scale = scale_of(temperature)
        lightest = (tl.load(min_p_ptr + row).to(tl.float64) * _LARGEST).to(tl.int64)
        u = uniform_of(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        chunks = tl.arange(0, CHUNK_BLOCK)
        chunk_weights = tl.load(
            chunk_weights_ptr + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0
        )
        if _is_truncated(top_k, top_p, SIZE):
            num_found = tl.load(num_candidates_ptr + row)
            ids_ptr = candidate_ids_ptr + row * MAX_CANDIDATES
            depths_ptr = candidate_depths_ptr + row * MAX_CANDIDATES
            total = tl.sum(chunk_weights, 0)
            if num_found <= FEW:
                token_id = draw_among_few(
                    ids_ptr, depths_ptr, num_found, top_k, top_p, total, u, scale, lightest,
                    SIZE, FEW, FEW_STEP,
                )  # fmt: skip
            else:
                is_whole = num_found > MAX_CANDIDATES
                count = tl.where(is_whole, SIZE, num_found)
                cut = find_cut(
                    logits_ptr, ids_ptr, depths_ptr, histograms_ptr + row * BINS, count, is_whole,
                    top_k, top_p, total, largest, scale, SIZE, MAX_CANDIDATES, BINS, BLOCK,
                )  # fmt: skip
                if is_whole:
                    chunk_weights = kept_chunk_weights(
                        logits_ptr, chunks, largest, scale, cut, lightest, SIZE, CHUNK, CHUNK_BLOCK
                    )
                    token_id = _choose_in_chunks(
                        logits_ptr, chunk_weights, chunks, u, largest, scale, cut, lightest,
                        SIZE, CHUNK,
                    )  # fmt: skip
                else:
                    token_id = draw_among(
                        logits_ptr, ids_ptr, depths_ptr, count, u, largest, scale, cut, lightest,
                        SIZE, ID_UNIT, ID_DIGITS, BLOCK,
                    )  # fmt: skip
        else:
            token_id = _choose_in_chunks(
                logits_ptr, chunk_weights, chunks, u, largest, scale, ANY_DEPTH, lightest,
                SIZE, CHUNK,
            )  # fmt: skip
    # False for NaN too, and for a row without a finite logit.
    is_sound = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(token_ids_ptr + row, tl.where(is_sound, token_id, NO_TOKEN).to(tl.int64))


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Returns [S] int64 of logits [S, V], contiguous; see models.ops.sampling.sample_tokens."""
    num_rows, size = logits.shape
    device = logits.device
    maxima = group_maxima(logits)
    num_groups = maxima.shape[1]
    chunk = min(CHUNK, num_groups * GROUP)
    num_chunks = triton.cdiv(size, chunk)
    max_candidates = min(_MAX_CANDIDATES, size)
    largest = torch.empty(num_rows, dtype=torch.float32, device=device)
    depth_bounds = torch.empty(num_rows, dtype=torch.int32, device=device)
    weight_bounds = torch.empty(num_rows, dtype=torch.int64, device=device)
    num_candidates = torch.empty(num_rows, dtype=torch.int32, device=device)
    histograms = torch.empty(num_rows, NUM_BINS, dtype=torch.int64, device=device)
    chunk_weights = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=device)
    candidate_ids, candidate_depths = torch.empty(
        2, num_rows, max_candidates, dtype=torch.int32, device=device
    ).unbind(0)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    group_block = triton.next_power_of_2(num_groups)
    _plan_kernel[(num_rows,)](
        maxima, temperature, top_k, top_p,
        largest, depth_bounds, weight_bounds, num_candidates, histograms,
        SIZE=size, GROUPS=num_groups, BLOCK=group_block, BINS=NUM_BINS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _gather_kernel[(num_chunks, num_rows)](
        logits, maxima, temperature, top_k, top_p, min_p,
        largest, depth_bounds, weight_bounds, num_candidates,
        histograms, chunk_weights, candidate_ids, candidate_depths,
        SIZE=size, GROUPS=num_groups, PER_CHUNK=chunk // GROUP, CHUNK=chunk,
        MAX_CANDIDATES=max_candidates, BINS=NUM_BINS,
        # Two programs per multiprocessor; 159 registers would leave room for one.
        num_warps=8, maxnreg=128, enable_fp_fusion=False,
    )  # fmt: skip
    id_digits = max(1, triton.cdiv((size - 1).bit_length(), 2))
    _choose_kernel[(num_rows,)](
        logits, maxima, temperature, top_k, top_p, min_p, seeds, positions,
        largest, num_candidates, histograms,
        chunk_weights, candidate_ids, candidate_depths, token_ids,
        SIZE=size, GROUPS=num_groups, GROUP=GROUP, GROUP_BLOCK=group_block,
        CHUNKS=num_chunks, CHUNK=chunk, CHUNK_BLOCK=triton.next_power_of_2(num_chunks),
        MAX_CANDIDATES=max_candidates, FEW=_FEW, FEW_STEP=_FEW_STEP, BLOCK=_BLOCK,
        ID_UNIT=4 ** (id_digits - 1), ID_DIGITS=id_digits, BINS=NUM_BINS, NO_TOKEN=NO_TOKEN,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return token_ids
