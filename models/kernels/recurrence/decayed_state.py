"""States that decay and take up products, S <- e^(r s) S + s k v^T, a token or a chunk at a time.

o = q^T S + d v. With sizes s of steps this is Mamba2 (arXiv 2405.21060): k is B, q is C, v is x and
r is A; with s = 1 it is lightning attention (arXiv 2401.04658).

In a chunk of 64 tokens, with c the sums of r s and D_ij = e^(c_i - c_j) for j <= i: o = e^c Q S +
tril(Q K^T * D s) V + d V; S <- e^(c_64) S + (e^(c_64 - c) s K)^T V. The loop is not
pipelined: see models.kernels.recurrence.gated_delta_pass.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.batch_invariance import is_batch_invariant
from models.forward_context import AttentionMetadata
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.recurrence.chunks import (
    CHUNK,
    LEAST_TILE,
    MOST_STEP,
    decay_between,
    load_rows,
)
from models.kernels.recurrence.gates import softplus
from models.kernels.recurrence.moved_states import move_to_end
from models.kernels.recurrence.state_rows import (
    StateForm,
    first_kept,
    first_position,
    recurrent_form,
    request_span,
    row_offset,
    slot_ptr,
)
from models.state_cache import StateCacheData

_STEP_COLUMNS = 16
_CHUNK_COLUMNS = 64
"""Elements of v that a program has."""
_CHUNK = tl.constexpr(CHUNK)

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_blocks",
    "least_tokens", "most_tokens",
]  # fmt: skip  # specialising on these would compile again while serving


class DecayHeads(NamedTuple):
    """Sizes of the rule.

    num_heads: of values. group: that share queries and keys. k_dim, v_dim: of heads. block_k: the
    power of two that holds k_dim. is_transposed: the cache has states [H, v_dim, k_dim], not
    [H, k_dim, v_dim]. has_sizes: steps have sizes, and outputs a part of v.
    """

    num_heads: int
    group: int
    k_dim: int
    v_dim: int
    block_k: int
    is_transposed: bool
    has_sizes: bool


class StepSizes(NamedTuple):
    """Sizes of a Mamba2 layer's steps: clamp(softplus(dt + dt_bias), *limits).

    dt: [T, H]; rows may be apart. dt_bias: [H]. d: [H], the part of v in the output.
    """

    dt: torch.Tensor
    dt_bias: torch.Tensor
    d: torch.Tensor
    limits: tuple[float, float]


@triton.jit
def _step_sizes(dt_ptr, dt_bias_ptr, dt_stride, low, high, tokens, mask, head):
    """Returns the sizes of steps, [N] or one; without any, ones. Zeros outside of the mask."""
    if dt_ptr is None:
        return tl.where(mask, 1.0, 0.0)
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        dt = tl.load(dt_ptr + tokens * dt_stride + head, mask=mask, other=0.0).to(tl.float32)
        dt = softplus(dt + tl.load(dt_bias_ptr + head).to(tl.float32))
        return tl.where(mask, tl.minimum(tl.maximum(dt, low), high), 0.0)


@triton.jit
def _rate_of(rates_ptr, head, heads: tl.constexpr):
    """Returns r: minus the slope, or A of its logarithm."""
    rate = tl.load(rates_ptr + head).to(tl.float32)
    return -tl.exp(rate) if heads.has_sizes else -rate


@triton.jit
def _state_ptrs(
    memory_ptr, table_ptr, head, dims, columns, num_blocks, form: tl.constexpr,
    heads: tl.constexpr,
):  # fmt: skip
    """Returns where elements of a head's state are, [K, V], and which of them there are."""
    mask = (dims < heads.k_dim)[:, None] & (columns < heads.v_dim)[None, :]
    if heads.is_transposed:
        row = head * heads.v_dim + columns
        at = row_offset(row, table_ptr, columns < heads.v_dim, num_blocks, form)
        ptrs = memory_ptr + at[None, :] + dims[:, None]
    else:
        row = head * heads.k_dim + dims
        at = row_offset(row, table_ptr, dims < heads.k_dim, num_blocks, form)
        ptrs = memory_ptr + at[:, None] + columns[None, :]
    return ptrs, mask


@triton.jit
def _keep_state(
    state, step, num_tokens, position, memory_ptr, table_ptr, table_stride, head, dims, columns,
    keeps, num_blocks, form: tl.constexpr, heads: tl.constexpr,
):  # fmt: skip
    """Stores the state after a token of a request in its slot; position: of the first token."""
    if step >= first_kept(num_tokens, form):
        slot = slot_ptr(table_ptr, position + step + 1, table_stride, form)
        ptrs, mask = _state_ptrs(memory_ptr, slot, head, dims, columns, num_blocks, form, heads)
        tl.store(ptrs, state.to(memory_ptr.dtype.element_ty), mask=mask & keeps)


@triton.jit(do_not_specialize=_VARYING)
def _decayed_step_kernel(
    q_ptr, k_ptr, v_ptr, rates_ptr, dt_ptr, dt_bias_ptr, d_ptr, output_ptr, memory_ptr,
    block_tables_ptr, seq_lens_ptr, query_start_ptr, q_stride, k_stride, v_stride, dt_stride,
    table_stride, num_blocks, most_tokens, low, high, scale, form: tl.constexpr,
    heads: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does all tokens of a request, if these are at most most_tokens, for COLUMNS of a head."""
    let_next_start(DEPENDENT)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    request = tl.program_id(2)
    dims = tl.arange(0, heads.block_k)
    is_column = columns < heads.v_dim
    rate = _rate_of(rates_ptr, head, heads)
    # Tables and states are of before this pass, so they need no wait.
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    start, end, has_state, keeps = request_span(request, query_start_ptr, seq_lens_ptr, table_ptr)
    has_tokens = (start < end) & (end - start <= most_tokens)
    position = first_position(request, seq_lens_ptr, start, end)
    slot = slot_ptr(table_ptr, position, table_stride, form)
    state_ptrs, mask = _state_ptrs(memory_ptr, slot, head, dims, columns, num_blocks, form, heads)
    is_read = mask & has_state & has_tokens
    state = tl.load(state_ptrs, mask=is_read, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    if has_tokens:
        at_k = head // heads.group * heads.k_dim + dims
        at_v = head * heads.v_dim + columns
        for step in range(end - start):
            token = start.to(tl.int64) + step
            is_dim = dims < heads.k_dim
            q = tl.load(q_ptr + token * q_stride + at_k, mask=is_dim, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + token * k_stride + at_k, mask=is_dim, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + token * v_stride + at_v, mask=is_column, other=0.0)
            v = v.to(tl.float32)
            size = _step_sizes(dt_ptr, dt_bias_ptr, dt_stride, low, high, token, True, head)
            state = state * tl.exp(rate * size) + k[:, None] * (v * size)[None, :]
            output = tl.sum(state * q[:, None], 0) * scale
            if d_ptr is not None:
                output += v * tl.load(d_ptr + head).to(tl.float32)
            if form.rounds:
                state = state.to(memory_ptr.dtype.element_ty).to(tl.float32)
            out_ptrs = output_ptr + token * (heads.num_heads * heads.v_dim) + at_v
            tl.store(out_ptrs, output.to(output_ptr.dtype.element_ty), mask=is_column)
            if form.slots > 1:
                _keep_state(
                    state, step, end - start, position, memory_ptr, table_ptr, table_stride, head,
                    dims, columns, keeps, num_blocks, form, heads,
                )  # fmt: skip
        if form.slots == 1:
            tl.store(state_ptrs, state.to(memory_ptr.dtype.element_ty), mask=mask & keeps)


@triton.jit(do_not_specialize=_VARYING)
def _decayed_chunks_kernel(
    q_ptr, k_ptr, v_ptr, rates_ptr, dt_ptr, dt_bias_ptr, d_ptr, output_ptr, memory_ptr,
    block_tables_ptr, seq_lens_ptr, query_start_ptr, q_stride, k_stride, v_stride, dt_stride,
    table_stride, num_blocks, least_tokens, low, high, scale, form: tl.constexpr,
    heads: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does all chunks of a request of at least least_tokens, for COLUMNS of a head."""
    let_next_start(DEPENDENT)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    request = tl.program_id(2)
    dims = tl.arange(0, heads.block_k)
    rate = _rate_of(rates_ptr, head, heads)
    at_k = head // heads.group * heads.k_dim
    at_v = head * heads.v_dim
    wait_for_previous(DEPENDENT)
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    start, end, has_state, keeps = request_span(request, query_start_ptr, seq_lens_ptr, table_ptr)
    if end - start >= least_tokens:
        state_ptrs, mask = _state_ptrs(
            memory_ptr, table_ptr, head, dims, columns, num_blocks, form, heads
        )
        state = tl.load(state_ptrs, mask=mask & has_state, other=0.0).to(tl.float32)
        for first in range(start, end, _CHUNK):
            tokens = first + tl.arange(0, _CHUNK)
            in_chunk = tokens < end
            q = load_rows(q_ptr + at_k, tokens, q_stride, in_chunk, dims, heads.k_dim)
            k = load_rows(k_ptr + at_k, tokens, k_stride, in_chunk, dims, heads.k_dim)
            v = load_rows(v_ptr + at_v, tokens, v_stride, in_chunk, columns, heads.v_dim)
            size = _step_sizes(
                dt_ptr, dt_bias_ptr, dt_stride, low, high, tokens.to(tl.int64), in_chunk, head
            )
            sums, total = tl.cumsum(rate * size, 0), tl.sum(rate * size, 0)
            scores = tl.dot(q, tl.trans(k)) * decay_between(sums, False) * size[None, :]
            output = tl.dot(q, state.to(q.dtype)) * tl.exp(sums)[:, None]
            output = (output + tl.dot(scores.to(v.dtype), v)) * scale
            values = v.to(tl.float32)
            if d_ptr is not None:
                output += values * tl.load(d_ptr + head).to(tl.float32)
            out_ptrs = output_ptr + tokens.to(tl.int64)[:, None] * (heads.num_heads * heads.v_dim)
            out_mask = in_chunk[:, None] & (columns < heads.v_dim)[None, :]
            output = output.to(output_ptr.dtype.element_ty)
            tl.store(out_ptrs + (at_v + columns)[None, :], output, mask=out_mask)
            added = (values * (size * tl.exp(total - sums))[:, None]).to(k.dtype)
            state = state * tl.exp(total) + tl.dot(tl.trans(k), added)
        # Found again, as the loop needs the registers.
        state_ptrs, mask = _state_ptrs(
            memory_ptr, table_ptr, head, dims, columns, num_blocks, form, heads
        )
        tl.store(state_ptrs, state.to(memory_ptr.dtype.element_ty), mask=mask & keeps)


def decayed_state(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rates: torch.Tensor,
    sizes: StepSizes | None,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    heads: DecayHeads,
    *,
    scale: float,
) -> None:
    """Applies the rule to each request's state, which it updates in place.

    In batch-invariant mode, and in 32 bits, every token is computed after the one before it;
    otherwise only those of requests with few query tokens are. Launches may be captured.

    Args:
        q: [T, H / group * k_dim]; rows may be apart.
        k: the same.
        v: [T, H * v_dim]; rows may be apart.
        rates: [H] float32, slopes, or if there are sizes A's logarithms.
        sizes: of steps.
        output: [T, H, v_dim], contiguous.
        cache: states.
        metadata: of the step; block_tables name the pages of states.
        heads: sizes of the rule.
        scale: of outputs, less their part of v.
    """
    limits, dt_stride = (0.0, 0.0), 0
    gates: tuple[torch.Tensor | None, ...] = (None, None, None)
    if sizes is not None:
        limits, gates, dt_stride = sizes.limits, sizes[:3], sizes.dt.stride(0)
    tables = metadata.block_tables
    pointers = (
        q, k, v, rates, *gates, output, cache.memory.view(cache.spec.dtype), tables,
        metadata.seq_lens, metadata.query_start_loc,
    )  # fmt: skip
    strides = (q.stride(0), k.stride(0), v.stride(0), dt_stride, tables.stride(0))
    form = recurrent_form(cache, rounds=is_batch_invariant())
    step, chunks = _launchers(form, heads, q.device)
    num_requests = len(metadata.seq_lens)
    has_chunks = metadata.max_seqlen_q > MOST_STEP and q.itemsize == 2 and not is_batch_invariant()
    if not has_chunks or num_requests > 1:
        most = MOST_STEP if has_chunks else len(q)
        grid = (-(-heads.v_dim // _STEP_COLUMNS), heads.num_heads, num_requests)
        step(grid, *pointers, *strides, cache.num_blocks, most, *limits, scale)
    if has_chunks:
        in_place = move_to_end(cache, metadata, least_tokens=MOST_STEP + 1)
        tables = in_place.block_tables
        pointers = (*pointers[:-3], tables, *pointers[-2:])
        strides = (*strides[:-1], tables.stride(0))
        grid = (-(-heads.v_dim // _CHUNK_COLUMNS), heads.num_heads, num_requests)
        chunks(grid, *pointers, *strides, cache.num_blocks, MOST_STEP + 1, *limits, scale)


@lru_cache
def _launchers(form: StateForm, heads: DecayHeads, device: torch.device) -> tuple[Launch, Launch]:
    """Returns the kernels of single tokens and of chunks."""
    step = Launch(
        _decayed_step_kernel, form=form, heads=heads, COLUMNS=_STEP_COLUMNS, num_warps=1,
        num_stages=1, **launch_options(device),
    )  # fmt: skip
    heads = heads._replace(block_k=max(LEAST_TILE, heads.block_k))
    chunks = Launch(
        _decayed_chunks_kernel, form=form._replace(slots=1), heads=heads, COLUMNS=_CHUNK_COLUMNS,
        num_warps=4, num_stages=1, **launch_options(device),
    )  # fmt: skip
    return step, chunks
