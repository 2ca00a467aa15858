"""Stores the rows of a step's tokens, and makes the entries that they complete."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.kernels.attention.compressed.row_places import (
    row_form,
    row_places,
    row_tensors,
)
from models.kernels.attention.request_search import request_of
from models.operands.entry_maker import EntryMaker
from models.operands.row_pages import RowPages

_TOKENS = 8
"""Tokens that an entry's program reads at once."""
_COLUMNS = 1024
"""Elements of a row that a program stores."""
_METADATA = ["query_start_ptr", "positions_ptr", "table_stride", "entry_stride", "num_requests"]
_TURN = tl.constexpr(6.283185307179586)


class EntryForm(NamedTuple):
    """All that a build is made for: sizes of EntryMaker, and where an entry is.

    begin, width, rate, overlaps, size, num_pairs: of the maker.
    place: of an entry in its row. block_d: a power of two that holds an entry.
    """

    begin: int
    width: int
    rate: int
    overlaps: bool
    size: int
    num_pairs: int
    place: int
    block_d: int
    tokens: int


@triton.jit(do_not_specialize=_METADATA)
def _store_kernel(
    rows_ptr, cache, query_start_ptr, positions_ptr, table_stride, num_requests,
    form: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores some elements of one token's row; the null block keeps its content."""
    token = tl.program_id(0)
    request = request_of(token, query_start_ptr, num_requests)
    position = tl.load(positions_ptr + token).to(tl.int32)
    table_ptr = cache.tables + request.to(tl.int64) * table_stride
    at, block = row_places(table_ptr, position, True, form)
    if block != 0:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < form.size
        row = tl.load(rows_ptr + token.to(tl.int64) * form.size + columns, mask=is_column)
        tl.store(cache.rows + at + columns, row.to(cache.rows.dtype.element_ty), mask=is_column)


@triton.jit
def _turned(entry, frequencies_ptr, position, table_scale, dtype: tl.constexpr, form: tl.constexpr):
    """Rotates the last pairs of neighbours of an entry, [block_d] float32."""
    evens, odds = tl.split(tl.reshape(entry, (form.block_d // 2, 2)))
    pairs = tl.arange(0, form.block_d // 2) - (form.size // 2 - form.num_pairs)
    are_turned = (pairs >= 0) & (pairs < form.num_pairs)
    frequencies = tl.load(frequencies_ptr + pairs, mask=are_turned, other=0.0)
    # Quick sines are right near zero only, so whole turns are taken off, in 64 bits.
    turns = (position.to(tl.float32) * frequencies).to(tl.float64) / _TURN
    angles = ((turns - tl.floor(turns + 0.5)) * _TURN).to(tl.float32)
    # Rounded where the reference rounds.
    cos = (tl.cos(angles) * table_scale).to(dtype).to(tl.float32)
    sin = (tl.sin(angles) * table_scale).to(dtype).to(tl.float32)
    cos = tl.where(are_turned, cos, 1.0)
    sin = tl.where(are_turned, sin, 0.0)
    turned = tl.join(evens * cos - odds * sin, odds * cos + evens * sin)
    return tl.reshape(turned, (form.block_d,))


@triton.jit(do_not_specialize=_METADATA)
def _entry_kernel(
    tokens, entries, bias_ptr, norm_ptr, frequencies_ptr, query_start_ptr, positions_ptr,
    table_stride, entry_stride, num_requests, eps, table_scale,
    token_form: tl.constexpr, entry_form: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Makes the entry that one token completes, if it does."""
    token = tl.program_id(0)
    position = tl.load(positions_ptr + token).to(tl.int32)
    if (position + 1) % form.rate != 0:
        return
    request = request_of(token, query_start_ptr, num_requests)
    number = position // form.rate
    entry_table_ptr = entries.tables + request.to(tl.int64) * entry_stride
    at_entry, block = row_places(entry_table_ptr, number, True, entry_form)
    if block == 0:
        return
    table_ptr = tokens.tables + request.to(tl.int64) * table_stride
    columns = tl.arange(0, form.block_d)
    is_column = columns < form.size
    highest = tl.full([form.block_d], -1e30, tl.float32)
    total = tl.full([form.block_d], 0.0, tl.float32)
    acc = tl.full([form.block_d], 0.0, tl.float32)
    for first in range(-form.rate if form.overlaps else 0, form.rate, form.tokens):
        places = first + tl.arange(0, form.tokens)
        numbers = number * form.rate + places
        are_seen = (places < form.rate) & (numbers >= 0)
        at, _ = row_places(table_ptr, numbers, are_seen, token_form)
        half = tl.full([form.tokens], 0, tl.int32)
        if form.overlaps:
            half = tl.where(places >= 0, form.size, 0)
        of_bias = (places + form.rate) % form.rate * form.width + half
        at_values = tokens.rows + (at + form.begin + half)[:, None] + columns[None, :]
        in_tile = are_seen[:, None] & is_column[None, :]
        values = tl.load(at_values, mask=in_tile, other=0.0).to(tl.float32)
        gates = tl.load(at_values + form.width, mask=in_tile, other=0.0).to(tl.float32)
        gates += tl.load(
            bias_ptr + of_bias[:, None] + columns[None, :], mask=in_tile, other=0.0
        ).to(tl.float32)
        gates = tl.where(are_seen[:, None], gates, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(gates, 0))
        weights = tl.exp(gates - new_highest[None, :])
        kept = tl.exp(highest - new_highest)
        total = total * kept + tl.sum(weights, 0)
        acc = acc * kept + tl.sum(weights * values, 0)
        highest = new_highest
    dtype = entries.rows.dtype.element_ty
    # Rounded where the reference rounds.
    entry = (acc / total).to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(entry * entry, 0) / form.size + eps)
    weight = tl.load(norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    entry = (entry * scale * weight).to(dtype).to(tl.float32)
    entry = _turned(entry, frequencies_ptr, number * form.rate, table_scale, dtype, form)
    at_columns = entries.rows + at_entry + form.place + columns
    tl.store(at_columns, entry.to(dtype), mask=is_column)


def store_rows(
    rows: torch.Tensor, pages: RowPages, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> None:
    """Stores a row of each token, [T, C], by its position, [T]; the host reads nothing.

    query_start_loc: [R + 1], where each request's query tokens start.
    """
    form, tables = row_form(pages), pages.block_tables
    columns = min(_COLUMNS, triton.next_power_of_2(form.size))
    _store_kernel[(len(positions), triton.cdiv(form.size, columns))](
        rows, row_tensors(pages), query_start_loc, positions, tables.stride(0),
        len(query_start_loc) - 1, form=form, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def make_entries(
    maker: EntryMaker,
    tokens: RowPages,
    entries: RowPages,
    place: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Makes the entries whose last token is in the step, of rows that are stored.

    place: of an entry in its row. Others as in store_rows.
    """
    size = maker.size
    form = EntryForm(
        begin=maker.begin, width=maker.width, rate=maker.rate, overlaps=maker.overlaps, size=size,
        num_pairs=len(maker.frequencies), place=place, block_d=triton.next_power_of_2(size),
        tokens=min(_TOKENS, triton.next_power_of_2(maker.rate)),
    )  # fmt: skip
    _entry_kernel[(len(positions),)](
        row_tensors(tokens), row_tensors(entries), maker.position_bias, maker.norm_weight,
        maker.frequencies, query_start_loc, positions, tokens.block_tables.stride(0),
        entries.block_tables.stride(0), len(query_start_loc) - 1, maker.eps, maker.table_scale,
        token_form=row_form(tokens), entry_form=row_form(entries), form=form, num_warps=4,
    )  # fmt: skip
