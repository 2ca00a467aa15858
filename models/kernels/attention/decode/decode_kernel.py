"""The kernel of decode attention: the keys of a sequence in parts, one program for each part."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from models.kernels.attention.decode.keys_of_8_bits import (
    attend_keys_of_8_bits,
    in_float16,
    load_tile,
)
from models.kernels.attention.decode.newest_token import (
    attend_newest,
    load_gains,
    partners_of,
    repeated,
)
from models.kernels.attention.decode.prefix_parts import SLOTS, begin_with_prefixes
from models.kernels.attention.key_parts import add_part, deal_keys, seen_keys, split_keys
from models.kernels.attention.online_softmax import (
    attend_keys,
    fold_tile,
    load_keys,
    see_nothing,
    see_sinks,
)
from models.kernels.attention.store_heads import store_heads
from models.kernels.attention.uniform_values import uniform
from models.kernels.launching.dependent_launch import let_next_start, wait_for_previous


class DecodeForm(NamedTuple):
    """All that a build of the kernel is made for: heads, what a step brings, and tiles.

    num_kv_heads, group: kv heads, and query heads of each.
    head_dim, block_size: elements of a head, slots of a block.
    window, soft_cap: 0 for none; a negative window is a chunk, as in the operator.
    has_sinks: heads have a score without a key.
    has_scales: the cache has 8 bits and scales.
    only_single_tokens: every request has one token; others are skipped without it.
    has_new: queries and the newest key are still to be transformed; has_norm: and normalised.

    rows, head_rows: rows of the products, and of what is computed head by head.
    padded_group, block_d: powers of two that hold a group and a head.
    keys, held_keys, stages, least_part, num_programs, starts_next_late, even_parts: of
        AttentionTiles.
    dealt: programs of a kv head that second and later parts are dealt to; 0 for equal parts.
    is_split: a sequence may have several parts.
    at_once: partial results that are read together.
    reads_words: takes the loop of keys_of_8_bits.
    gathers: see attend_newest.
    prefix_programs: programs of a kv head in prefix_attention, whose results a sequence begins
        with; 0: none.
    has_assembly: a GPU runs the kernel, not Triton's interpreter.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int
    soft_cap: float
    has_sinks: bool
    has_scales: bool
    only_single_tokens: bool
    has_new: bool
    has_norm: bool
    rows: int
    head_rows: int
    padded_group: int
    block_d: int
    keys: int
    held_keys: int
    stages: int
    least_part: int
    num_programs: int
    starts_next_late: bool
    dealt: int
    even_parts: bool
    is_split: bool
    at_once: int
    reads_words: bool
    gathers: bool
    prefix_programs: int
    has_assembly: bool


class New(NamedTuple):
    """A step's keys and values, and how they and the queries are transformed: NewTokens."""

    k: Any
    v: Any
    cos: Any
    sin: Any
    q_weight: Any
    k_weight: Any


class Strides(NamedTuple):
    """Whole heads from one token to the next."""

    q: Any
    k: Any
    v: Any
    rotation: Any


VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "slots_ptr", "table_stride",
    "num_splits", "output_scale_stride", "q_stride", "k_stride", "v_stride", "rotation_stride",
    "own_lens_ptr", "tile_slots_ptr", "prefix_tiles_ptr",
]  # fmt: skip
"""Parameters on which no build depends: that would build again while serving.

They are in no tuple, as Triton looks at all that is in one.
"""


@triton.jit(do_not_specialize=VARYING)
def decode_kernel(  # noqa: C901, PLR0912  # only a kernel itself can return early
    q_ptr, cache, output_ptr, output_scale_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr,
    own_lens_ptr, tile_slots_ptr, prefix_tiles_ptr, prefix_parts, parts, new, slots_ptr, sinks_ptr,
    table_stride, num_splits, output_scale_stride, q_stride, k_stride, v_stride, rotation_stride,
    scale_log2, eps,
    form: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attends the query heads of one kv head of one request to one part of its keys.

    With has_new, the program of the last part stores the newest key and its value; no other program
    needs them. Parts are of keys that are in no shared prefix; own_lens has their numbers, and the
    program of the first part begins with the prefixes.
    """
    if not form.has_new:
        wait_for_previous(DEPENDENT)
    kv_head = tl.program_id(0)
    request, split, part, active, num_before = _place(own_lens_ptr, query_start_ptr, form)
    if form.dealt > 0:
        if split >= active:
            return
        request = request.to(tl.int64)
    token = request
    if not form.only_single_tokens:
        token = tl.load(query_start_ptr + request).to(tl.int64)
        if tl.load(query_start_ptr + request + 1) - token != 1:
            return
    seq_len = tl.load(seq_lens_ptr + request)
    if form.dealt > 0:
        seq_len = uniform(seq_len, form.has_scales and form.has_assembly)
    start, end = seen_keys(seq_len, form.window)
    place = -1
    if form.prefix_programs > 0:
        start = seq_len - tl.load(own_lens_ptr + request)
        start = uniform(start, form.has_scales and form.has_assembly)
        place = tl.load(tile_slots_ptr + request * SLOTS, mask=split == 0, other=-1)
        place = uniform(place, form.has_scales and form.has_assembly)
    if form.has_new:
        # The newest key is seen while it is in registers: no thread waits for it to be stored.
        end -= 1
    if form.is_split and form.dealt == 0:
        if split > 0 and split * form.least_part >= end - start:
            return
        part, active = split_keys(
            end - start, num_splits, own_lens_ptr, form.num_kv_heads, form.window,
            form.num_programs, form.keys, form.least_part,
        )  # fmt: skip
        if split >= active:
            return
    if form.is_split:
        start += split * part
        end = tl.minimum(start + part, end)

    dims = tl.arange(0, form.block_d)
    table_ptr = block_tables_ptr + request * table_stride
    # All but the newest keys are from earlier steps: load them while the queries are computed.
    held = None
    if form.held_keys > 0:
        held = _load_held(start, end, table_ptr, cache, kv_head, dims, form)
    q, acc, highest, total = _begin(
        q_ptr, cache, new, slots_ptr, sinks_ptr,
        Strides(q_stride, k_stride, v_stride, rotation_stride), token, kv_head, split, active,
        seq_len, dims, scale_log2, eps, form, DEPENDENT,
    )  # fmt: skip
    if form.prefix_programs > 0:
        acc, highest, total = begin_with_prefixes(
            acc, highest, total, place, tile_slots_ptr + request * SLOTS, prefix_tiles_ptr,
            prefix_parts, kv_head, dims, form,
        )  # fmt: skip
    dtype = q.dtype
    acc = repeated(acc, form.rows)
    highest = repeated(highest, form.rows)
    total = repeated(total, form.rows)
    if form.reads_words:
        acc, highest, total = _attend_words(
            q, acc, highest, total, start, end, held, table_ptr, cache, kv_head, dims, scale_log2,
            form,
        )  # fmt: skip
    else:
        acc, highest, total = _attend_tiles(
            q, highest, total, acc, start, end, held, table_ptr, cache, kv_head, dims, scale_log2,
            seq_len, form,
        )  # fmt: skip
    if form.starts_next_late:
        let_next_start(DEPENDENT)
    _store(
        acc, highest, total, request, token, kv_head, split, active, num_before, num_splits, dims,
        parts, output_ptr, output_scale_ptr, output_scale_stride, dtype, form,
    )  # fmt: skip


@triton.jit
def _place(own_lens_ptr, query_start_ptr, form: tl.constexpr):
    """Returns what deal_keys does; with equal parts, the request and the number of the part.

    Parts that only long sequences have start last.
    """
    if form.dealt > 0:
        # The loop over keys of 8 bits leaves a thread no registers for the place of its part.
        return deal_keys(
            tl.program_id(1), tl.num_programs(1) - form.dealt, own_lens_ptr, query_start_ptr,
            form.window, form.dealt, form.keys, form.least_part, form.only_single_tokens,
            form.has_new, form.has_scales and form.has_assembly, form.even_parts,
        )  # fmt: skip
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        # Without parts a program saves the registers that adding them up takes.
        return tl.program_id(1).to(tl.int64), tl.program_id(2), 0, 1, 0


@triton.jit
def _load_held(start, end, table_ptr, cache, kv_head, dims, form: tl.constexpr):
    """Returns the first held_keys keys and values of a part."""
    if form.reads_words:
        held_keys = start + tl.arange(0, form.held_keys)
        return load_tile(held_keys, held_keys < end, table_ptr, cache, kv_head, dims, form)
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return load_keys(start, end, table_ptr, cache, kv_head, dims, form)


@triton.jit
def _begin(
    q_ptr, cache, new, slots_ptr, sinks_ptr, strides, token, kv_head, split, active, seq_len, dims,
    scale_log2, eps, form: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Returns queries, [head_rows, block_d], and a softmax that has seen sink and newest key.

    With has_new it waits for the kernels before. Returns q, weighted values, highest and total.
    """
    partners = partners_of(dims, form.head_dim)
    # Heads of the group repeat, so that a warp holds every head that it computes.
    heads = tl.arange(0, form.head_rows) % form.padded_group
    in_group = heads < form.group
    if form.has_new:
        gains = load_gains(
            new.q_weight, new.k_weight, heads, dims, partners, form.head_dim, form.has_norm
        )
        wait_for_previous(DEPENDENT)
    if not form.starts_next_late:
        let_next_start(DEPENDENT)
    highest, total = see_nothing(form.head_rows)
    if form.has_sinks and split == 0:
        highest, total = see_sinks(sinks_ptr + kv_head * form.group, heads, in_group)
    if form.has_new:
        is_last = (split == active - 1) & (seq_len > 0)
        q, acc, highest, total = attend_newest(
            q_ptr, new, strides, slots_ptr, cache, token, kv_head, heads, in_group, dims, partners,
            gains, is_last, highest, total, scale_log2, eps, form,
        )  # fmt: skip
    else:
        q, acc = _load_queries(q_ptr, token, kv_head, heads, in_group, dims, form)
    return q, acc, highest, total


@triton.jit
def _load_queries(q_ptr, token, kv_head, heads, in_group, dims, form: tl.constexpr):
    """Returns queries that are transformed already, [head_rows, block_d], and empty sums."""
    at_heads = ((token * form.num_kv_heads + kv_head) * form.group + heads)[:, None] * form.head_dim
    in_heads = in_group[:, None] & (dims < form.head_dim)[None, :]
    q = tl.load(q_ptr + at_heads + dims[None, :], mask=in_heads, other=0.0)
    return q, tl.full([form.head_rows, form.block_d], 0.0, tl.float32)


@triton.jit
def _attend_words(
    q, acc, highest, total, start, end, held, table_ptr, cache, kv_head, dims, scale_log2,
    form: tl.constexpr,
):  # fmt: skip
    """Adds keys of 8 bits to a running softmax; values are read in words."""
    if form.padded_group > 8:
        # Converted in the tile's layout, many rows take fewer registers.
        q, q_scale = in_float16(repeated(q, form.rows), form.rows)
    else:
        q, q_scale = in_float16(q, form.head_rows)
        q, q_scale = repeated(q, form.rows), repeated(q_scale, form.rows)
    return attend_keys_of_8_bits(
        q, q_scale, acc, highest, total, start, end, held, table_ptr, cache, kv_head, dims,
        scale_log2, form,
    )  # fmt: skip


@triton.jit
def _attend_tiles(
    q, highest, total, acc, start, end, held, table_ptr, cache, kv_head, dims, scale_log2, seq_len,
    form: tl.constexpr,
):  # fmt: skip
    """Adds keys to a running softmax, the held ones first."""
    q = repeated(q, form.rows)
    positions = tl.full([form.rows], 0, tl.int32) + seq_len
    if form.held_keys > 0:
        held_k, held_v = held
        held_keys = start + tl.arange(0, form.held_keys)
        acc, highest, total = fold_tile(
            q, held_k, held_v, 1.0, 1.0, acc, highest, total, held_keys, end, positions, scale_log2,
            True, 0, False, form.soft_cap,
        )  # fmt: skip
        start += form.held_keys
    if form.held_keys == 0 or start < end:
        acc, highest, total = attend_keys(
            q, acc, highest, total, start, end, positions, table_ptr, cache, kv_head, dims,
            scale_log2, True, 0, form,
        )  # fmt: skip
    return acc, highest, total


@triton.jit
def _store(
    acc, highest, total, request, token, kv_head, split, active, num_before, num_splits, dims,
    parts, output_ptr, output_scale_ptr, output_scale_stride, dtype, form: tl.constexpr,
):  # fmt: skip
    """Stores the heads' outputs, or one part of them, which the last program adds up."""
    # A dummy request has no keys; its output is zero.
    acc *= (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    rows = tl.arange(0, form.rows)
    in_rows = rows < form.group
    in_tile = in_rows[:, None] & (dims < form.head_dim)[None, :]
    at_scale = kv_head * form.group * output_scale_stride + token
    if active == 1:
        at_rows = ((token * form.num_kv_heads + kv_head) * form.group + rows)[:, None]
        at_rows = at_rows * form.head_dim
        at_rows += dims[None, :]
        at_scales = at_scale + rows * output_scale_stride
        store_heads(acc, output_ptr, output_scale_ptr, at_rows, at_scales, in_tile, in_rows, dtype)
    else:
        if form.dealt > 0:
            # Sequences of second and later parts have at most twice as many parts in all.
            counter = kv_head * (2 * form.dealt) + num_before
            first_partial = counter
        else:
            counter = request * form.num_kv_heads + kv_head
            first_partial = counter * num_splits
        add_part(
            acc, highest, total, rows, in_rows, in_tile, dims, parts, output_ptr, output_scale_ptr,
            first_partial, counter, token * form.num_kv_heads + kv_head, at_scale,
            output_scale_stride, split, active,
            form.group, form.padded_group, form.head_dim, form.block_d, form.at_once, dtype,
        )  # fmt: skip
