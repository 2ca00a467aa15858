"""The request and the keys of a piece of work of hopper_attention, found on the device."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from models.kernels.attention.prefill.tile_parts import LEAST_PART, NUM_PLANNED

NO_UNIT = gl.constexpr(2**30)
"""A unit that follows all others."""

_SEEN_AT_ONCE = gl.constexpr(256)
"""Requests that the warp reads together."""


@gluon.jit
def _add(first, second):
    return first + second


@gluon.jit
def _tiles_of_many(
    first, query_start_ptr, is_ready_ptr, num_requests, min_queries, QUERIES: gl.constexpr,
    form: gl.constexpr,
):  # fmt: skip
    """Returns requests from `first` on, which there are, their tokens and their tiles of queries.

    Requests to skip have no tiles.
    """
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    requests = first + gl.arange(0, _SEEN_AT_ONCE, layout)
    is_request = requests < num_requests
    starts = gl.load(query_start_ptr + requests, mask=is_request, other=0)
    num_queries = gl.load(query_start_ptr + requests + 1, mask=is_request, other=0) - starts
    is_mine = is_request & (num_queries >= min_queries)
    if form.has_ready:
        is_mine = is_mine & (gl.load(is_ready_ptr + requests, mask=is_request, other=0) != 0)
    num_tiles = gl.where(is_mine, (num_queries + QUERIES - 1) // QUERIES, 0)
    return requests, is_request, num_queries, num_tiles


@gluon.jit
def parts_of_each_key(
    query_start_ptr, seq_lens_ptr, is_ready_ptr, num_requests, min_queries, num_shares,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """Returns one over the keys that each of num_shares programs would get, at least LEAST_PART.

    A tile has at most one part for each time that its keys are that number, so the tiles with
    several have at most num_shares in all. Without shares no tile has several.
    """
    parts = 0.0
    if num_shares > 0:
        num_key_tiles = 0
        for first in range(0, num_requests, _SEEN_AT_ONCE):
            requests, is_request, num_queries, num_tiles = _tiles_of_many(
                first, query_start_ptr, is_ready_ptr, num_requests, min_queries, QUERIES, form
            )
            num_keys = gl.load(seq_lens_ptr + requests, mask=is_request, other=0)
            # Half of a chunk's own keys, on average.
            seen = gl.maximum(num_keys - num_queries, 0) + num_tiles * (QUERIES // 2)
            if form.window > 0:
                seen = gl.minimum(seen, form.window)
            # Of integers all lanes have the same sum for the compiler.
            num_key_tiles += gl.sum(num_tiles * ((seen + KEYS - 1) // KEYS), 0)
        fair = num_key_tiles * (1.0 * KEYS * form.num_kv_heads) / num_shares
        parts = 1.0 / gl.maximum(fair, 1.0 * LEAST_PART)
    return parts


@gluon.jit
def parts_of_tile(num_cached, parts_of_key, WINDOW: gl.constexpr):
    """Returns into how many parts the keys of each tile of a request are split.

    Cached keys count: all of its tiles read them.
    """
    if WINDOW > 0:
        num_cached = gl.minimum(num_cached, WINDOW)
    return gl.maximum((num_cached.to(gl.float32) * parts_of_key).to(gl.int32), 1)


@gluon.jit
def request_of_unit(
    unit, query_start_ptr, seq_lens_ptr, is_ready_ptr, num_requests, min_queries, parts_of_key,
    QUERIES: gl.constexpr, IS_SHARED: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """Returns a unit's request, that request's first unit, and the earlier units of split tiles.

    A unit is a tile of queries; IS_SHARED: a part of the keys of one. For NO_UNIT returns the
    numbers of all units. All lanes search, as every piece begins so.
    """
    request = 0
    first_unit = 0
    num_before = 0
    num_split = 0
    for first in range(0, num_requests, _SEEN_AT_ONCE):
        requests, is_request, num_queries, counts = _tiles_of_many(
            first, query_start_ptr, is_ready_ptr, num_requests, min_queries, QUERIES, form
        )
        if IS_SHARED:
            num_keys = gl.load(seq_lens_ptr + requests, mask=is_request, other=0)
            num_parts = parts_of_tile(num_keys - num_queries, parts_of_key, form.window)
            counts *= num_parts
        ends = num_before + gl.associative_scan(counts, 0, _add)
        is_earlier = is_request & (ends <= unit)
        request += gl.sum(is_earlier.to(gl.int32), 0)
        first_unit = gl.maximum(first_unit, gl.max(gl.where(is_earlier, ends, 0), 0))
        if IS_SHARED:
            num_split += gl.sum(gl.where(is_earlier & (num_parts > 1), counts, 0), 0)
        num_before += gl.sum(counts, 0)
    return request, first_unit, num_split


@gluon.jit
def keys_of_part(part, num_parts, first, end, KEYS: gl.constexpr):
    """Returns the first and the end of a part's keys; it has a whole tile of them at least."""
    num_tiles = (end - first + KEYS - 1) // KEYS
    start = first + part * num_tiles // num_parts * KEYS
    return start, gl.minimum(first + (part + 1) * num_tiles // num_parts * KEYS, end)


@gluon.jit
def note_part(plan_ptr, place, part, num_parts, first_token, num_tokens, kv_head):
    """Writes a part's line of the plan, if its tile has several: tile_parts."""
    line_ptr = plan_ptr + (1 + place + part) * NUM_PLANNED
    is_split = num_parts > 1
    gl.store(line_ptr, gl.where(part == 0, num_parts, 0), mask=is_split)
    gl.store(line_ptr + 1, first_token, mask=is_split)
    gl.store(line_ptr + 2, num_tokens, mask=is_split)
    gl.store(line_ptr + 3, kv_head, mask=is_split)
