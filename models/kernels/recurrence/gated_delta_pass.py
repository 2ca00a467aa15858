"""The second part of the gated delta rule in chunks: from chunk to chunk, with the state.

V' = U - W S; S <- e^(c_64) S + (e^(c_64 - c) K)^T V', which is one chain of products; then o = (e^c
Q) S + tril(Q K^T * D) V' of all chunks at once. See gated_delta_chunks for the rest.

A program has 64 columns: with 32 Triton 3.6 builds wrong outputs and addresses for Hopper, of some
sizes even in one stage; with 64, all comparisons with float64 hold.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kernels.gpu import gpu_of
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.recurrence.chunks import (
    CHUNK,
    MOST_STEP,
    find_chunk,
    load_rows,
    num_chunks,
    store_rows,
)
from models.kernels.recurrence.gated_delta_step import DeltaHeads
from models.kernels.recurrence.state_rows import (
    StateForm,
    recurrent_form,
    request_span,
    row_offset,
)
from models.state_cache import StateCacheData

_COLUMNS = 64
"""Columns of the state that a program has; twice as many of outputs, where heads have them."""
_STAGED_DIM, _STAGES = 128, 3
"""Elements of a key for which loads run ahead of products, by as many chunks; a sequence of 8,192
tokens took 474 us in one stage, 386 in two and 266 in three. Other sizes were not compared."""
_CHUNK = tl.constexpr(CHUNK)

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_blocks",
    "num_tokens", "num_requests", "least_tokens",
]  # fmt: skip  # specialising on these would compile again while serving


class Prepared(NamedTuple):
    """Results of the kernels before.

    writes: U, [H, T, Dv]. reads: W, [H, T, Dk]. scores: tril(Q K^T * D), [H, T, 64]; all of qkv's
    dtype.
    q_factors, k_factors: [H, T] float32, of rows of Q S and of V' as it is added to the state.
    decays: [H, T] float32, of the state over a chunk, at its first token.
    queries: e^c Q, keys: e^(c_64 - c) K, normalised, [H, T, Dk] of qkv's dtype; sums: c, float32;
    these if each channel of k has a decay, instead of the last three.
    """

    writes: Any
    reads: Any
    scores: Any
    q_factors: Any = None
    k_factors: Any = None
    decays: Any = None
    queries: Any = None
    keys: Any = None
    sums: Any = None


@triton.jit
def _load_factors(ptr, at, in_chunk):
    """Returns factors of a chunk's rows, [64, 1]; ones if there are none."""
    if ptr is None:
        return 1.0
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return tl.load(ptr + at, mask=in_chunk, other=0.0)[:, None]


@triton.jit
def _decay_of(prepared, at_head, first, last, dims, heads: tl.constexpr):
    """Returns the factor of the state over a chunk, of each channel [K, 1] or of all."""
    if heads.decays_channels:
        sums_ptrs = prepared.sums + (at_head + last) * heads.k_dim + dims
        return tl.exp(tl.load(sums_ptrs, mask=dims < heads.k_dim, other=0.0))[:, None]
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return tl.load(prepared.decays + at_head + first)


@triton.jit
def _queries_and_keys(qkv_ptr, prepared, head, at_head, heads: tl.constexpr):
    """Returns where a head's queries and keys are."""
    if heads.decays_channels:
        at = at_head * heads.k_dim
        return prepared.queries + at, prepared.keys + at
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        q_ptr = qkv_ptr + head // (heads.num_heads // heads.num_k_heads) * heads.k_dim
        return q_ptr, q_ptr + heads.num_k_heads * heads.k_dim


@triton.jit(do_not_specialize=_VARYING)
def _pass_delta_chunks_kernel(
    qkv_ptr, prepared, states_ptr, memory_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr,
    qkv_stride, table_stride, num_blocks, num_tokens, least_tokens, form: tl.constexpr,
    heads: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does all chunks of a request of at least least_tokens, for COLUMNS of a head's state.

    Writes V' in place of U, and the state before each chunk.
    """
    let_next_start(DEPENDENT)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    request = tl.program_id(2)
    dims = tl.arange(0, heads.block_k)
    mask = (dims < heads.k_dim)[:, None] & (columns < heads.v_dim)[None, :]
    at_head = head.to(tl.int64) * num_tokens
    reads_ptr = prepared.reads + at_head * heads.k_dim
    writes_ptr = prepared.writes + at_head * heads.v_dim
    _, k_ptr = _queries_and_keys(qkv_ptr, prepared, head, at_head, heads)
    stride = heads.k_dim if heads.decays_channels else qkv_stride
    wait_for_previous(DEPENDENT)
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    start, end, has_state, keeps = request_span(request, query_start_ptr, seq_lens_ptr, table_ptr)
    if end - start >= least_tokens:
        row = head * heads.k_dim + dims
        at_rows = row_offset(row, table_ptr, dims < heads.k_dim, num_blocks, form)
        state_ptrs = memory_ptr + at_rows[:, None] + columns[None, :]
        state = tl.load(state_ptrs, mask=mask & has_state, other=0.0).to(tl.float32)
        for first in range(start, end, _CHUNK):
            tokens = first + tl.arange(0, _CHUNK)
            in_chunk = tokens < end
            # All of a chunk's loads are under way before its first product.
            reads = load_rows(reads_ptr, tokens, heads.k_dim, in_chunk, dims, heads.k_dim)
            writes = load_rows(writes_ptr, tokens, heads.v_dim, in_chunk, columns, heads.v_dim)
            k = load_rows(k_ptr, tokens, stride, in_chunk, dims, heads.k_dim)
            k_factors = _load_factors(prepared.k_factors, at_head + tokens, in_chunk)
            rounded = state.to(reads.dtype)
            chunk = start // _CHUNK + request + (first - start) // _CHUNK
            before_ptrs = _chunk_state_ptrs(states_ptr, chunk, head, dims, columns, heads)
            tl.store(before_ptrs, rounded, mask=mask)
            values = writes.to(tl.float32) - tl.dot(reads, rounded)
            store_rows(writes_ptr, tokens, values, in_chunk, columns, heads.v_dim)
            added = (values * k_factors).to(k.dtype)
            last = tl.minimum(first + _CHUNK, end) - 1
            state *= _decay_of(prepared, at_head, first, last, dims, heads)
            state += tl.dot(tl.trans(k), added)
        tl.store(state_ptrs, state.to(memory_ptr.dtype.element_ty), mask=mask & keeps)


@triton.jit
def _chunk_state_ptrs(states_ptr, chunk, head, dims, columns, heads: tl.constexpr):
    """Returns where the state of a head before a chunk is, [K, V]."""
    row = (chunk.to(tl.int64) * heads.num_heads + head) * heads.k_dim + dims
    return states_ptr + row[:, None] * heads.v_dim + columns[None, :]


@triton.jit(do_not_specialize=_VARYING)
def _read_delta_chunks_kernel(
    qkv_ptr, prepared, states_ptr, output_ptr, query_start_ptr, qkv_stride, num_tokens,
    num_requests, least_tokens, heads: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes the outputs of one chunk, for COLUMNS of a head."""
    let_next_start(DEPENDENT)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    dims = tl.arange(0, heads.block_k)
    at_head = head.to(tl.int64) * num_tokens
    q_ptr, _ = _queries_and_keys(qkv_ptr, prepared, head, at_head, heads)
    stride = heads.k_dim if heads.decays_channels else qkv_stride
    wait_for_previous(DEPENDENT)
    first, last = find_chunk(chunk, query_start_ptr, num_requests, least_tokens)
    if first < last:
        tokens = first + tl.arange(0, _CHUNK)
        in_chunk = tokens < last
        places = tl.arange(0, _CHUNK)
        is_column = (columns < heads.v_dim)[None, :]
        scores_ptr = prepared.scores + at_head * _CHUNK
        writes_ptr = prepared.writes + at_head * heads.v_dim
        q = load_rows(q_ptr, tokens, stride, in_chunk, dims, heads.k_dim)
        state_ptrs = _chunk_state_ptrs(states_ptr, chunk, head, dims, columns, heads)
        state = tl.load(state_ptrs, mask=(dims < heads.k_dim)[:, None] & is_column, other=0.0)
        scores = load_rows(scores_ptr, tokens, _CHUNK, in_chunk, places, _CHUNK)
        values = load_rows(writes_ptr, tokens, heads.v_dim, in_chunk, columns, heads.v_dim)
        q_factors = _load_factors(prepared.q_factors, at_head + tokens, in_chunk)
        output = tl.dot(q, state) * q_factors
        output += tl.dot(scores, values)
        out_ptrs = output_ptr + tokens.to(tl.int64)[:, None] * (heads.num_heads * heads.v_dim)
        output = output.to(output_ptr.dtype.element_ty)
        out_ptrs += (head * heads.v_dim + columns)[None, :]
        tl.store(out_ptrs, output, mask=in_chunk[:, None] & is_column)


def pass_chunks(
    qkv: torch.Tensor,
    prepared: Prepared,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    heads: DeltaHeads,
) -> None:
    """Computes outputs and states of requests of more than MOST_STEP query tokens."""
    tables, starts = metadata.block_tables, metadata.query_start_loc
    num_tokens, num_requests = len(qkv), len(metadata.seq_lens)
    chunks = num_chunks(num_tokens, num_requests)
    states = qkv.new_empty(chunks, heads.num_heads, heads.k_dim, heads.v_dim)
    form = recurrent_form(cache, rounds=False)
    pass_states, read_states = _launchers(form, heads, qkv.device)
    pass_states(
        (-(-heads.v_dim // _COLUMNS), heads.num_heads, num_requests),
        qkv, prepared, states, cache.memory.view(cache.spec.dtype), tables, metadata.seq_lens,
        starts, qkv.stride(0), tables.stride(0), cache.num_blocks, num_tokens, MOST_STEP + 1,
    )  # fmt: skip
    read_states(
        (-(-heads.v_dim // _read_columns(heads)), heads.num_heads, chunks),
        qkv, prepared, states, output, starts, qkv.stride(0), num_tokens, num_requests,
        MOST_STEP + 1,
    )  # fmt: skip


@lru_cache
def _launchers(form: StateForm, heads: DeltaHeads, device: torch.device) -> tuple[Launch, Launch]:
    """Returns the kernel that goes from chunk to chunk, and the one of outputs."""
    options = {"heads": heads, "num_warps": 4, **launch_options(device)}
    is_staged = heads.k_dim == _STAGED_DIM and gpu_of(device).is_hopper
    stages = _STAGES if is_staged else 1
    return (
        Launch(
            _pass_delta_chunks_kernel, form=form, COLUMNS=_COLUMNS, num_stages=stages, **options
        ),
        Launch(_read_delta_chunks_kernel, COLUMNS=_read_columns(heads), num_stages=1, **options),
    )


def _read_columns(heads: DeltaHeads) -> int:
    return _COLUMNS if heads.v_dim % (2 * _COLUMNS) else 2 * _COLUMNS
