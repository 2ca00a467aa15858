"""Where the rows of a state are among the blocks of a cache; see models.state_cache."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.state_cache import StateCacheData


class StateForm(NamedTuple):
    """Layout of a part of a state in a cache: its recurrent rows, or the inputs of its convolution.

    regions: of a block. unit: elements of one region of a block. per_unit: rows of a state, or
    inputs of a convolution, in a unit. columns: elements of a row, or channels. first_unit: the
    unit in which they begin. rounds: the state has the bits of the cache after every token. slots:
    states of a request.
    """

    regions: int
    unit: int
    per_unit: int
    columns: int
    first_unit: int
    rounds: bool
    slots: int = 1


def recurrent_form(cache: StateCacheData, *, rounds: bool) -> StateForm:
    """Returns the form of a cache's recurrent states.

    Raises:
        ValueError: see StateSpec.num_row_units.
    """
    spec = cache.spec
    spec.num_row_units(cache.unit_bytes)
    return StateForm(
        regions=len(cache.memory),
        unit=cache.unit_bytes // spec.dtype.itemsize,
        per_unit=cache.rows_per_unit,
        columns=spec.head_columns,
        first_unit=0,
        rounds=rounds and spec.dtype != torch.float32,
        slots=cache.num_slots,
    )


def conv_form(cache: StateCacheData) -> StateForm:
    """Returns the form of a cache's inputs of the convolution."""
    return StateForm(
        regions=len(cache.memory),
        unit=cache.unit_bytes // cache.spec.conv_dtype.itemsize,
        per_unit=cache.conv_per_unit,
        columns=cache.spec.conv_channels,
        first_unit=cache.first_conv_unit,
        rounds=False,
        slots=cache.num_slots,
    )


@triton.jit
def unit_offset(unit, table_ptr, mask, num_blocks, form: tl.constexpr):
    """Returns where units of a request's state begin, in elements; table_ptr: its pages."""
    page = tl.load(table_ptr + unit // form.regions, mask=mask, other=0).to(tl.int64)
    return ((unit % form.regions) * num_blocks + page) * form.unit


@triton.jit
def row_offset(row, table_ptr, mask, num_blocks, form: tl.constexpr):
    """Returns where rows of a request's recurrent state begin, in elements."""
    at_unit = unit_offset(row // form.per_unit, table_ptr, mask, num_blocks, form)
    return at_unit + (row % form.per_unit) * form.columns


@triton.jit
def conv_offset(
    row,
    is_row,
    first,
    lane,
    is_lane,
    table_ptr,
    num_blocks,
    form: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Returns where kept inputs are, rows [N, 1] of channels first + lane [1, C], in elements.

    WHOLE: all channels of a row are in one unit.
    """
    element = row * form.columns + first
    mask = is_row
    if not WHOLE:
        element += lane
        mask = is_row & is_lane
    unit = element // form.per_unit
    # Not the remainder: Triton would not know that it is aligned.
    at = element - unit * form.per_unit
    at += unit_offset(form.first_unit + unit, table_ptr, mask, num_blocks, form)
    return at + lane if WHOLE else at


@triton.jit
def request_span(request, query_start_ptr, seq_lens_ptr, table_ptr):
    """Returns a request's first token, the end of its tokens, and whether it has and keeps a state.

    A dummy request, whose first page is the null block, does neither. table_ptr: its pages.
    """
    start = tl.load(query_start_ptr + request)
    end = tl.load(query_start_ptr + request + 1)
    keeps = tl.load(table_ptr) != 0
    return start, end, keeps & (tl.load(seq_lens_ptr + request) > end - start), keeps


@triton.jit
def first_position(request, seq_lens_ptr, start, end):
    """Returns the position of a request's first query token, of those from `start` to `end`."""
    return tl.maximum(tl.load(seq_lens_ptr + request) - (end - start), 0)


@triton.jit
def slot_ptr(table_ptr, position, table_stride, form: tl.constexpr):
    """Returns where the pages of a request's state after `position` tokens are named."""
    if form.slots == 1:
        return table_ptr
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return table_ptr + position % form.slots * (table_stride // form.slots)


@triton.jit
def first_kept(num_tokens, form: tl.constexpr):
    """Returns the first token of a step after which the state is kept; it is after all later ones.

    A step of more tokens than slots has no drafts: it keeps its last state.
    """
    return tl.where(num_tokens <= form.slots, 0, num_tokens - 1)
