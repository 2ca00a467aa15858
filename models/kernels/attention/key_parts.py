"""Splits a sequence's keys into parts for several programs, and adds up their results."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from models.kernels.attention.chunk_start import chunk_start
from models.kernels.attention.store_heads import store_heads
from models.kernels.attention.uniform_values import uniform

_SEEN_AT_ONCE = tl.constexpr(256)
"""Requests that a program reads together."""


class Parts(NamedTuple):
    """Tensors of an AttentionWorkspace; in a kernel these are pointers."""

    partials: Any
    lse: Any
    counters: Any


@triton.jit
def seen_keys(seq_len, WINDOW: tl.constexpr):
    """Returns the first key that the newest token of a sequence sees, and the end of its keys."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    elif WINDOW < 0:
        first = chunk_start(seq_len - 1, WINDOW)
    return first, seq_len


@triton.jit
def split_keys(
    num_keys, num_splits, seq_lens_ptr, NUM_KV_HEADS: tl.constexpr, WINDOW: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, KEYS: tl.constexpr, LEAST_PART: tl.constexpr,
):  # fmt: skip
    """Splits the keys of a sequence into equal parts of whole tiles of KEYS, from LEAST_PART on.

    Returns the keys of a part, and how many parts have keys: short sequences leave programs without
    one. NUM_PROGRAMS > 0: parts are no shorter than fair_part.
    """
    num_keys = tl.maximum(num_keys, 1)
    part = tl.maximum(tl.cdiv(num_keys, num_splits), LEAST_PART)
    if NUM_PROGRAMS > 0:
        part = tl.maximum(part, fair_part(seq_lens_ptr, NUM_KV_HEADS, WINDOW, NUM_PROGRAMS))
    part = tl.cdiv(part, KEYS) * KEYS
    return part, tl.cdiv(num_keys, part)


@triton.jit
def deal_keys(
    place, num_requests, seq_lens_ptr, query_start_ptr, WINDOW: tl.constexpr,
    DEALT: tl.constexpr, KEYS: tl.constexpr, LEAST_PART: tl.constexpr,
    ONLY_SINGLE_TOKENS: tl.constexpr, HAS_NEW: tl.constexpr, SHARES: tl.constexpr,
    EVEN_PARTS: tl.constexpr,
):  # fmt: skip
    """Returns the part that the program at `place` computes.

    Each of the first programs has the first part of a request; the last DEALT share the second and
    later parts of all sequences. All parts but the last of a sequence have equal lengths, whole
    tiles of KEYS from LEAST_PART on: what each of DEALT programs would get of all keys. So there
    are never more than DEALT second and later parts.

    EVEN_PARTS: a sequence has that many parts, but the last is as long as the others, up to a tile.
    ONLY_SINGLE_TOKENS: every request has one token; without it, others get no second part.
    HAS_NEW: a sequence's newest key is in no part.

    Returns the request, its part, the keys of a part, how many parts the request has, and how many
    all split sequences before it have. A program without a part gets one past the last. SHARES: see
    uniform.
    """
    dealt = place - num_requests
    is_dealt = dealt >= 0
    request = tl.where(is_dealt, 0, place)
    split = is_dealt.to(tl.int32)
    part = LEAST_PART
    active = 1
    num_before = 0
    own = _keys_of_one(request, seq_lens_ptr, query_start_ptr, WINDOW, ONLY_SINGLE_TOKENS, HAS_NEW)
    own = uniform(own, SHARES)
    # Most sequences are too short for two parts: their programs read no other's length.
    if is_dealt | (own > LEAST_PART):
        part, longest = _fair_part(
            num_requests, seq_lens_ptr, query_start_ptr, WINDOW, DEALT, KEYS, LEAST_PART,
            ONLY_SINGLE_TOKENS, HAS_NEW,
        )  # fmt: skip
        part, longest = uniform(part, SHARES), uniform(longest, SHARES)
        if tl.where(is_dealt, longest, own) > part:
            owner = 0
            num_parts = 0
            parts_before = 0
            for first in range(0, num_requests, _SEEN_AT_ONCE):
                requests, keys = _keys_of_many(
                    first, num_requests, seq_lens_ptr, query_start_ptr, WINDOW,
                    ONLY_SINGLE_TOKENS, HAS_NEW,
                )  # fmt: skip
                later = tl.maximum(tl.cdiv(keys, part) - 1, 0)
                ends = num_parts + tl.cumsum(later, 0)
                is_before = tl.where(is_dealt, ends <= dealt, requests < request)
                is_before = is_before & (requests < num_requests)
                owner += tl.sum(is_before.to(tl.int32), 0)
                parts_before += tl.sum(tl.where(is_before, later, 0), 0)
                num_before += tl.sum((is_before & (later > 0)).to(tl.int32), 0)
                num_parts += tl.sum(later, 0)
            owner, parts_before = uniform(owner, SHARES), uniform(parts_before, SHARES)
            num_before = uniform(num_before + parts_before, SHARES)
            if is_dealt:
                split = dealt - parts_before + 1
            if owner < num_requests:
                request = owner
                own = _keys_of_one(
                    request, seq_lens_ptr, query_start_ptr, WINDOW, ONLY_SINGLE_TOKENS, HAS_NEW
                )
                own = uniform(own, SHARES)
                active = tl.cdiv(own, part)
                if EVEN_PARTS:
                    part = tl.cdiv(tl.cdiv(own, active), KEYS) * KEYS
                    active = tl.cdiv(own, part)
            else:
                active = split
    return request, split, part, active, num_before


@triton.jit
def _fair_part(
    num_requests, seq_lens_ptr, query_start_ptr, WINDOW: tl.constexpr, DEALT: tl.constexpr,
    KEYS: tl.constexpr, LEAST_PART: tl.constexpr, ONLY_SINGLE_TOKENS: tl.constexpr,
    HAS_NEW: tl.constexpr,
):  # fmt: skip
    """Returns the keys of a part, and the keys of the longest sequence."""
    # Requests that share a prefix may have more keys than 32 bits count.
    num_keys = tl.zeros([], tl.int64)
    longest = 0
    for first in range(0, num_requests, _SEEN_AT_ONCE):
        _, keys = _keys_of_many(
            first, num_requests, seq_lens_ptr, query_start_ptr, WINDOW, ONLY_SINGLE_TOKENS, HAS_NEW
        )
        num_keys += tl.sum(keys.to(tl.int64), 0)
        longest = tl.maximum(longest, tl.max(keys, 0))
    part = tl.maximum(tl.cdiv(num_keys, DEALT).to(tl.int32), LEAST_PART)
    return tl.cdiv(part, KEYS) * KEYS, longest


@triton.jit
def _num_keys(seq_lens, WINDOW: tl.constexpr, HAS_NEW: tl.constexpr):
    if WINDOW > 0:
        seq_lens = tl.minimum(seq_lens, WINDOW)
    elif WINDOW < 0:
        seq_lens -= chunk_start(seq_lens - 1, WINDOW)
    if HAS_NEW:
        seq_lens = tl.maximum(seq_lens - 1, 0)
    return seq_lens


@triton.jit
def _keys_of_one(
    request, seq_lens_ptr, query_start_ptr, WINDOW: tl.constexpr,
    ONLY_SINGLE_TOKENS: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    """Returns how many keys a request's parts have."""
    keys = _num_keys(tl.load(seq_lens_ptr + request), WINDOW, HAS_NEW)
    if not ONLY_SINGLE_TOKENS:
        start = tl.load(query_start_ptr + request)
        keys = tl.where(tl.load(query_start_ptr + request + 1) - start == 1, keys, 0)
    return keys


@triton.jit
def _keys_of_many(
    first, num_requests, seq_lens_ptr, query_start_ptr, WINDOW: tl.constexpr,
    ONLY_SINGLE_TOKENS: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    """Returns the requests from `first` on and how many keys their parts have."""
    requests = first + tl.arange(0, _SEEN_AT_ONCE)
    is_request = requests < num_requests
    seq_lens = tl.load(seq_lens_ptr + requests, mask=is_request, other=0)
    keys = _num_keys(seq_lens, WINDOW, HAS_NEW)
    if not ONLY_SINGLE_TOKENS:
        start = tl.load(query_start_ptr + requests, mask=is_request, other=0)
        end = tl.load(query_start_ptr + requests + 1, mask=is_request, other=0)
        keys = tl.where(end - start == 1, keys, 0)
    return requests, keys


@triton.jit
def add_part(
    acc, highest, total, rows, in_rows, in_tile, dims, parts, output_ptr, output_scale_ptr,
    first_partial, counter, output_pair, at_scale, scale_stride,
    split, active,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores the result of one part; the program that comes last adds all parts up.

    acc: [ROWS, BLOCK_D], of which in_tile exists; rows, in_rows, dims: its rows and columns.
    first_partial: number of the first part's result, which those of the others follow; counter:
        number of the counter; output_pair: of the token and kv head.
    at_scale: place of the first head's scale, scale_stride: distance of the next one's.
    output_scale_ptr, DTYPE: as in store_heads.
    """
    partials_ptr = parts.partials + first_partial * GROUP * HEAD_DIM
    lse_ptr = parts.lse + first_partial * GROUP
    at_partial = (split * GROUP + rows)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(partials_ptr + at_partial, acc, mask=in_tile)
    tl.store(lse_ptr + split * GROUP + rows, highest + tl.log2(total), mask=in_rows)
    # All threads' stores come before the arrival that shows them to the last program.
    tl.debug_barrier()
    num_arrived = tl.atomic_add(parts.counters + counter, 1, sem="acq_rel")
    if num_arrived == active - 1:
        tl.store(parts.counters + counter, 0)
        combine_parts(
            partials_ptr, lse_ptr, output_ptr + output_pair * GROUP * HEAD_DIM, output_scale_ptr,
            at_scale, scale_stride, active,
            GROUP, PADDED_GROUP, HEAD_DIM, BLOCK_D, AT_ONCE, DTYPE,
        )  # fmt: skip


@triton.jit
def combine_parts(
    partials_ptr, lse_ptr, output_ptr, output_scale_ptr, at_scale, scale_stride, active,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores the mean of `active` partial results, weighted by their sums of exponentials.

    AT_ONCE: partial results that are read together.
    .cg bypasses the first-level cache, which may hold values from before other programs wrote.
    """
    rows = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, BLOCK_D)
    in_rows = rows < GROUP
    in_tile = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    acc, _, total = sum_parts(
        partials_ptr, lse_ptr, active, rows, dims, GROUP, HEAD_DIM, BLOCK_D, AT_ONCE
    )
    at_tile = rows[:, None] * HEAD_DIM + dims[None, :]
    at_scales = at_scale + rows * scale_stride
    store_heads(
        acc / total[:, None],
        output_ptr,
        output_scale_ptr,
        at_tile,
        at_scales,
        in_tile,
        in_rows,
        DTYPE,
    )


@triton.jit
def sum_parts(
    partials_ptr, lse_ptr, active, rows, dims,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Returns the sum of `active` partial results, as combine_parts weighs them, highest and total.

    rows, dims: of the results of a part, [PADDED_GROUP] and [BLOCK_D].
    """
    lse, partial = _read_parts(
        partials_ptr, lse_ptr, 0, active, rows, dims, GROUP, HEAD_DIM, BLOCK_D, AT_ONCE
    )
    highest = tl.max(lse, 1)
    weights = tl.exp2(lse - highest[:, None])
    total = tl.sum(weights, 1)
    acc = tl.sum(weights[:, :, None] * partial, 1)
    for first in range(AT_ONCE, active, AT_ONCE):
        lse, partial = _read_parts(
            partials_ptr, lse_ptr, first, active, rows, dims, GROUP, HEAD_DIM, BLOCK_D, AT_ONCE
        )
        new_highest = tl.maximum(highest, tl.max(lse, 1))
        weights = tl.exp2(lse - new_highest[:, None])
        kept = tl.exp2(highest - new_highest)
        total = total * kept + tl.sum(weights, 1)
        acc = acc * kept[:, None] + tl.sum(weights[:, :, None] * partial, 1)
        highest = new_highest
    return acc, highest, total


@triton.jit
def _read_parts(
    partials_ptr, lse_ptr, first, active, rows, dims,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Returns AT_ONCE parts' lse, [PADDED_GROUP, AT_ONCE], and results, [.., .., BLOCK_D].

    A thread has the same elements of all parts: sums over parts wait for no other thread.
    """
    splits = first + tl.arange(0, AT_ONCE)
    is_active = splits < active
    in_rows = rows < GROUP
    at_heads = splits[None, :] * GROUP + rows[:, None]
    in_heads = in_rows[:, None] & is_active[None, :]
    lse = tl.load(lse_ptr + at_heads, mask=in_heads, other=float("-inf"), cache_modifier=".cg")
    partial = tl.load(
        partials_ptr + at_heads[:, :, None] * HEAD_DIM + dims[None, None, :],
        mask=in_heads[:, :, None] & (dims < HEAD_DIM)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    # A padding row has no partial result; zero keeps its difference from being inf - inf.
    lse = tl.where(in_rows[:, None], lse, 0.0)
    return lse, partial


@triton.jit
def fair_part(
    seq_lens_ptr, NUM_KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, NUM_PROGRAMS: tl.constexpr
):
    """Returns how many keys each of NUM_PROGRAMS gets in an equal split.

    NUM_PROGRAMS is at least the number of requests.
    """
    requests = tl.arange(0, NUM_PROGRAMS)
    lens = tl.load(seq_lens_ptr + requests, mask=requests < tl.num_programs(1), other=0)
    if WINDOW > 0:
        lens = tl.minimum(lens, WINDOW)
    elif WINDOW < 0:
        lens -= chunk_start(lens - 1, WINDOW)
    # In float32: the product may exceed 32 bits and need not be exact.
    return (tl.sum(lens.to(tl.float32), 0) * (NUM_KV_HEADS / NUM_PROGRAMS)).to(tl.int32)
