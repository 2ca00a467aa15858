"""The warp of hopper_attention that finds work and has the copy engine load it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from models.kernels.attention.prefill.hopper_pieces import (
    NO_UNIT,
    keys_of_part,
    note_part,
    parts_of_each_key,
    parts_of_tile,
    request_of_unit,
)
from models.kernels.launching.dependent_launch import wait_for_previous
from models.kernels.launching.gluon_names import load_box, load_elements, reinterpret

CHUNK_DIMS = gl.constexpr(64)
"""Most dimensions of a head in one copy: rows of 128 bytes (CUDA C++ Programming Guide)."""

_NOTES = gl.constexpr(7)
_NOTES_OF_PART = gl.constexpr(10)

_GATHERED_ROWS = gl.constexpr(16)
"""Rows of queries that the warp copies together."""


@gluon.jit
def _note(notes, place, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    notes.index(place).store(gl.full([1], value, gl.int32, layout))


@gluon.constexpr_function
def num_notes(is_shared):
    """Returns how many integers describe a piece of work.

    _announce writes them, attend_all reads them. is_shared: a piece may be a part of others' keys.
    """
    return _NOTES_OF_PART if is_shared else _NOTES


@gluon.constexpr_function
def is_packed(group):
    """Whether rows of queries have no padding, as it would be more than a fifth of them.

    The copy engine pads: its boxes are powers of two. A warp that copies packed rows itself takes
    longer. 2048 and 8192 tokens of 40 heads in groups of 5 took 101 and 1,092 us packed, 131 and
    1,635 padded; 28 heads in groups of 7 took 85.5 and 898 packed, 70.8 and 824 padded (H100,
    heads of 128, 2026-11).
    """
    return 5 * group < 4 * (1 << (group - 1).bit_length())


@gluon.constexpr_function
def rows_of_token(group):
    """Returns the rows that the heads of a token take, padding included."""
    return group if is_packed(group) else 1 << (group - 1).bit_length()


@gluon.constexpr_function
def arrivals_of_queries(group):
    """Returns how many arrivals there are for each piece's queries."""
    return 33 if is_packed(group) else 1


@gluon.jit
def _gather_queries(
    tiles, slot, arrived, q_ptr, kv_head, query_start, num_queries, first_query, new_k,
    form: gl.constexpr,
):  # fmt: skip
    """Copies a piece's queries: row i is head i % group of token i // group, at most the last one.

    All lanes copy, and each arrives once its copies have.
    """
    ROWS: gl.constexpr = tiles.shape[1]
    HEAD_DIM: gl.constexpr = tiles.shape[2]
    CHUNKS: gl.constexpr = HEAD_DIM // CHUNK_DIMS
    PARTS: gl.constexpr = ROWS // _GATHERED_ROWS
    NUM_PIECES: gl.constexpr = tiles.numel // (_GATHERED_ROWS * CHUNK_DIMS)
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    pieces = reinterpret(tiles, tiles.dtype, [NUM_PIECES, _GATHERED_ROWS, CHUNK_DIMS], new_k.layout)
    dims = gl.arange(0, CHUNK_DIMS, gl.SliceLayout(0, lanes))
    for i in range(2 * PARTS):
        rows = i * _GATHERED_ROWS + gl.arange(0, _GATHERED_ROWS, gl.SliceLayout(1, lanes))
        token = query_start + gl.minimum(first_query + rows // form.group, num_queries - 1)
        at_heads = (
            token.to(gl.int64) * form.num_kv_heads + kv_head
        ) * form.group + rows % form.group
        pointers = q_ptr + at_heads[:, None] * HEAD_DIM + dims[None, :]
        for chunk in gl.static_range(CHUNKS):
            piece = ((2 * slot + i // PARTS) * CHUNKS + chunk) * PARTS + i % PARTS
            load_elements(pieces.index(piece), pointers + chunk * CHUNK_DIMS)
    async_copy.mbarrier_arrive(arrived, increment_count=False)
    mbarrier.arrive(arrived, count=1)


@gluon.jit
def _announce(
    q_ring, number, queries, first, end, kv_head, query_start, num_queries, num_cached,
    first_query, part, num_parts, place, new_k, IS_SHARED: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """Loads a piece's queries, half of the rows for each warpgroup, and writes its notes."""
    tiles, notes, full, empty = q_ring
    SLOTS: gl.constexpr = full.shape[0]
    slot = number % SLOTS
    mbarrier.wait(empty.index(slot), (number // SLOTS & 1) ^ 1)
    values = (
        first, end, kv_head, query_start, num_queries, num_cached, first_query, part, num_parts,
        place,
    )  # fmt: skip
    for i in gl.static_range(num_notes(IS_SHARED)):
        _note(notes, slot * num_notes(IS_SHARED) + i, values[i])
    if is_packed(form.group):
        _gather_queries(
            tiles, slot, full.index(slot), queries, kv_head, query_start, num_queries, first_query,
            new_k, form,
        )  # fmt: skip
    else:
        QUERIES: gl.constexpr = queries.block_type.shape[0]
        HEADS: gl.constexpr = queries.block_type.shape[1]
        HEAD_DIM: gl.constexpr = queries.block_type.shape[2]
        boxes = reinterpret(
            tiles, tiles.dtype, [2 * SLOTS, QUERIES, HEADS, HEAD_DIM], queries.layout
        )
        mbarrier.expect(full.index(slot), 2 * QUERIES * HEADS * HEAD_DIM * 2)
        for half in gl.static_range(2):
            load_box(
                queries, [query_start + first_query + half * QUERIES, kv_head * form.group, 0],
                full.index(slot), boxes.index(slot * 2 + half),
            )  # fmt: skip


@gluon.jit
def _announce_end(q_ring, number, GROUP: gl.constexpr, IS_SHARED: gl.constexpr):
    """Announces a piece without keys, which ends the work."""
    _, notes, full, empty = q_ring
    SLOTS: gl.constexpr = full.shape[0]
    slot = number % SLOTS
    mbarrier.wait(empty.index(slot), (number // SLOTS & 1) ^ 1)
    for i in gl.static_range(num_notes(IS_SHARED)):
        _note(notes, slot * num_notes(IS_SHARED) + i, 0)
    mbarrier.arrive(full.index(slot), count=arrivals_of_queries(GROUP))


@gluon.jit
def _rows_of(
    table_ptr, first_key, seq_len, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr
):
    """Returns the cache rows where every ROWS keys of a tile start; past the end, the last ones."""
    rows = ()
    for i in gl.static_range(KEYS // ROWS):
        key = gl.minimum(first_key + i * ROWS, seq_len - 1)
        block = gl.load(table_ptr + key // BLOCK_SIZE)
        row = block * BLOCK_SIZE + key % BLOCK_SIZE // ROWS * ROWS
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005  # the compiler unrolls it
    return rows


@gluon.jit
def _pieces_of(tiles, cache):
    """Returns tiles as the pieces that are copied from the cache, first dimensions first.

    That is their order in shared memory (NVMMASharedLayout).
    """
    NUM_PIECES: gl.constexpr = tiles.numel // (cache.block_type.shape[0] * CHUNK_DIMS)
    return reinterpret(
        tiles, tiles.dtype, [NUM_PIECES, cache.block_type.shape[0], CHUNK_DIMS], cache.layout
    )


@gluon.jit
def _copy_tile(tiles, stage, arrived, new, cache, is_new, new_row, cache_rows, kv_head):
    """Copies a tile from the step's own keys or values, or piece by piece from the cache."""
    KEYS: gl.constexpr = tiles.shape[1]
    HEAD_DIM: gl.constexpr = tiles.shape[2]
    ROWS: gl.constexpr = cache.block_type.shape[0]
    NUM_ROWS: gl.constexpr = KEYS // ROWS
    CHUNKS: gl.constexpr = HEAD_DIM // CHUNK_DIMS
    mbarrier.expect(arrived, KEYS * HEAD_DIM * 2)
    if is_new:
        load_box(new, [new_row, kv_head * HEAD_DIM], arrived, tiles.index(stage))
    else:
        pieces = _pieces_of(tiles, cache)
        for i in gl.static_range(NUM_ROWS):
            for chunk in gl.static_range(CHUNKS):
                load_box(
                    cache, [cache_rows[i], kv_head * HEAD_DIM + chunk * CHUNK_DIMS], arrived,
                    pieces.index((stage * CHUNKS + chunk) * NUM_ROWS + i),
                )  # fmt: skip


@gluon.jit
def _clear_past_end(v_tiles, stage, v_cache, num_keys):
    """Zeroes a tile's values past its sequence's end.

    They may be NaN, and a weight of zero times NaN is NaN.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    ROWS: gl.constexpr = v_cache.block_type.shape[0]
    NUM_ROWS: gl.constexpr = v_tiles.shape[1] // ROWS
    NUM_PIECES: gl.constexpr = NUM_ROWS * v_tiles.shape[2] // CHUNK_DIMS
    pieces = _pieces_of(v_tiles, v_cache)
    for i in range(NUM_PIECES):
        first = i % NUM_ROWS * ROWS
        if first + ROWS > num_keys:
            piece = pieces.index(stage * NUM_PIECES + i)
            keys = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            piece.store(gl.where((keys < num_keys)[:, None], piece.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _copy_k(k_ring, released, number, new_k, k_cache, is_new, new_row, rows, kv_head):
    tiles, full = k_ring
    STAGES: gl.constexpr = tiles.shape[0]
    stage = number % STAGES
    mbarrier.wait(released.index(stage), (number // STAGES & 1) ^ 1)
    _copy_tile(tiles, stage, full.index(stage), new_k, k_cache, is_new, new_row, rows, kv_head)


@gluon.jit
def _copy_v(
    v_ring, released, cleared, number, num_cleared, new_v, v_cache, is_new, new_row, rows,
    kv_head, num_keys,
):  # fmt: skip
    """Loads a tile of values; returns how many tiles have been cleared so far.

    The warpgroups are done with a tile's values once they have read the keys of the next tile.
    """
    tiles, full = v_ring
    STAGES: gl.constexpr = tiles.shape[0]
    stage = number % STAGES
    following = number + 1
    mbarrier.wait(released.index(following % STAGES), (following // STAGES & 1) ^ 1)
    has_end = num_keys < tiles.shape[1]
    arrived = full.index(stage)
    if has_end:
        arrived = cleared
    _copy_tile(tiles, stage, arrived, new_v, v_cache, is_new, new_row, rows, kv_head)
    if has_end:
        mbarrier.wait(cleared, num_cleared & 1)
        num_cleared += 1
        _clear_past_end(tiles, stage, v_cache, num_keys)
        mbarrier.arrive(full.index(stage), count=1)
    return num_cleared


@gluon.jit
def _copy_piece(
    k_ring, v_ring, released, cleared, num_copied, num_cleared, new_k, new_v, k_cache, v_cache,
    table_ptr, first, end, query_start, num_cached, seq_len, kv_head, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Loads a piece's keys and values; returns how many tiles were loaded and cleared so far."""
    KEYS: gl.constexpr = new_k.block_type.shape[0]
    ROWS: gl.constexpr = k_cache.block_type.shape[0]
    is_new = num_cached == 0
    # New keys need no table; only its first entry is read then, and not used.
    table_len = gl.where(is_new, 1, seq_len)
    rows = _rows_of(table_ptr, first, table_len, BLOCK_SIZE, KEYS, ROWS)
    for first_key in range(first, end, KEYS):
        new_row = query_start + first_key
        _copy_k(k_ring, released, num_copied, new_k, k_cache, is_new, new_row, rows, kv_head)
        # Read long before they are used: the wait for room for values comes first.
        next_rows = _rows_of(table_ptr, first_key + KEYS, table_len, BLOCK_SIZE, KEYS, ROWS)
        num_cleared = _copy_v(
            v_ring, released, cleared, num_copied, num_cleared, new_v, v_cache, is_new, new_row,
            rows, kv_head, seq_len - first_key,
        )  # fmt: skip
        rows = next_rows
        num_copied += 1
    return num_copied, num_cleared


@gluon.jit
def copy_all(
    q_ring, k_ring, v_ring, released, cleared, ticket_ptr, queries, new_k, new_v, k_cache, v_cache,
    block_tables_ptr, seq_lens_ptr, query_start_ptr, is_ready_ptr, parts, table_stride,
    num_requests, min_queries, num_shares, form: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Loads pieces of work until there are none left: hopper_attention.

    A piece is a tile of queries and a kv head; with a plan, a part of its keys. A free program
    draws the next ticket, and the one that draws the last resets the counter. A piece without keys
    ends the warpgroups.
    """
    QUERIES: gl.constexpr = 2 * q_ring[0].shape[1] // rows_of_token(form.group)
    KEYS: gl.constexpr = new_k.block_type.shape[0]
    IS_SHARED: gl.constexpr = parts is not None
    wait_for_previous(DEPENDENT)
    parts_of_key = 0.0
    if IS_SHARED:
        parts_of_key = parts_of_each_key(
            query_start_ptr, seq_lens_ptr, is_ready_ptr, num_requests, min_queries, num_shares,
            QUERIES, KEYS, form,
        )  # fmt: skip
    _, num_units, num_split = request_of_unit(
        NO_UNIT, query_start_ptr, seq_lens_ptr, is_ready_ptr, num_requests, min_queries,
        parts_of_key, QUERIES, IS_SHARED, form,
    )  # fmt: skip
    num_pieces = num_units * form.num_kv_heads
    work = gl.program_id(0)
    if IS_SHARED:
        gl.store(parts.plan, num_split * form.num_kv_heads, mask=work == 0)
    num_announced = 0
    num_copied = 0
    num_cleared = 0
    while work < num_pieces:
        # The last tiles of a chunk have the most keys; they start first.
        unit = num_units - 1 - work // form.num_kv_heads
        kv_head = work % form.num_kv_heads
        request, first_unit, num_before = request_of_unit(
            unit, query_start_ptr, seq_lens_ptr, is_ready_ptr, num_requests, min_queries,
            parts_of_key, QUERIES, IS_SHARED, form,
        )  # fmt: skip
        query_start = gl.load(query_start_ptr + request)
        num_queries = gl.load(query_start_ptr + request + 1) - query_start
        # Dummy requests have no keys; give them as many as queries.
        seq_len = gl.maximum(gl.load(seq_lens_ptr + request), num_queries)
        num_cached = seq_len - num_queries
        tile = unit - first_unit
        part = 0
        num_parts = 1
        if IS_SHARED:
            num_parts = parts_of_tile(num_cached, parts_of_key, form.window)
            part = tile % num_parts
            tile = tile // num_parts
        first_query = tile * QUERIES
        first = 0
        if form.window > 0:
            first = gl.maximum(num_cached + first_query + 1 - form.window, 0) // KEYS * KEYS
        end = num_cached + gl.minimum(first_query + QUERIES, num_queries)
        place = 0
        if IS_SHARED:
            place = (
                num_before * form.num_kv_heads + (tile * form.num_kv_heads + kv_head) * num_parts
            )
            note_part(
                parts.plan, place, part, num_parts, query_start + first_query,
                gl.minimum(num_queries - first_query, QUERIES), kv_head,
            )  # fmt: skip
            first, end = keys_of_part(part, num_parts, first, end, KEYS)
        _announce(
            q_ring, num_announced, queries, first, end, kv_head, query_start, num_queries,
            num_cached, first_query, part, num_parts, place, new_k, IS_SHARED, form,
        )  # fmt: skip
        num_announced += 1
        num_copied, num_cleared = _copy_piece(
            k_ring, v_ring, released, cleared, num_copied, num_cleared, new_k, new_v, k_cache,
            v_cache, block_tables_ptr + request.to(gl.int64) * table_stride, first, end,
            query_start, num_cached, seq_len, kv_head, form.block_size,
        )  # fmt: skip
        # Drawn no earlier, so that the first free program gets the longest piece left.
        ticket = gl.atomic_add(ticket_ptr, 1, sem="relaxed")
        if ticket == num_pieces - 1:
            gl.store(ticket_ptr, 0)
        work = gl.num_programs(0) + ticket
    _announce_end(q_ring, num_announced, form.group, IS_SHARED)
