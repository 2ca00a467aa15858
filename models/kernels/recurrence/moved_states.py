"""Moves states of requests with several slots to where a chunk of a prompt leaves them.

Kernels of chunks update states in place; with slots the state after a chunk is elsewhere than the
one before it. See models.state_cache.
"""

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.recurrence.state_rows import (
    StateForm,
    first_position,
    recurrent_form,
    request_span,
    slot_ptr,
    unit_offset,
)
from models.state_cache import StateCacheData

_ELEMENTS = 1024
"""Elements that a program moves at a time."""

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_pages",
    "num_blocks", "least_tokens",
]  # fmt: skip  # specialising on these would compile again while serving


@triton.jit(do_not_specialize=_VARYING)
def _move_states_kernel(
    memory_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr, pages_ptr, table_stride,
    num_pages, num_blocks, least_tokens, form: tl.constexpr, ELEMENTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Moves one unit of a request's state, and names the pages of its slot after the step."""
    let_next_start(DEPENDENT)
    unit = tl.program_id(0)
    request = tl.program_id(1)
    wait_for_previous(DEPENDENT)
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    start, end, has_state, _ = request_span(request, query_start_ptr, seq_lens_ptr, table_ptr)
    position = first_position(request, seq_lens_ptr, start, end)
    target = slot_ptr(table_ptr, position + end - start, table_stride, form)
    for page in range(unit, num_pages, tl.num_programs(0)):
        tl.store(pages_ptr + request * num_pages + page, tl.load(target + page))
    is_moved = has_state & (position % form.slots != (position + end - start) % form.slots)
    if is_moved & (end - start >= least_tokens):
        source = slot_ptr(table_ptr, position, table_stride, form)
        from_ptr = memory_ptr + unit_offset(unit, source, True, num_blocks, form)
        to_ptr = memory_ptr + unit_offset(unit, target, True, num_blocks, form)
        for first in range(0, form.unit, ELEMENTS):
            element = first + tl.arange(0, ELEMENTS)
            mask = element < form.unit
            tl.store(to_ptr + element, tl.load(from_ptr + element, mask=mask), mask=mask)


def move_to_end(
    cache: StateCacheData, metadata: AttentionMetadata, *, least_tokens: int
) -> AttentionMetadata:
    """Moves the recurrent states of requests to their slots after the step.

    Launches may be captured. Without several slots nothing moves.

    Args:
        cache: states.
        metadata: of the step; block_tables name the pages of all slots.
        least_tokens: requests with fewer query tokens are left out.

    Returns:
        The metadata, with the pages of each request's slot after the step.
    """
    if cache.num_slots == 1:
        return metadata
    tables = metadata.block_tables
    num_requests, width = tables.shape
    num_pages = width // cache.num_slots
    pages = torch.empty(num_requests, num_pages, dtype=tables.dtype, device=tables.device)
    form = recurrent_form(cache, rounds=False)
    _launcher(form, tables.device)(
        (max(1, cache.first_conv_unit), num_requests, 1),
        cache.memory.view(cache.spec.dtype), tables, metadata.seq_lens, metadata.query_start_loc,
        pages, tables.stride(0), num_pages, cache.num_blocks, least_tokens,
    )  # fmt: skip
    return replace(metadata, block_tables=pages)


@lru_cache
def _launcher(form: StateForm, device: torch.device) -> Launch:
    return Launch(
        _move_states_kernel, form=form, ELEMENTS=_ELEMENTS, num_warps=4, **launch_options(device)
    )
