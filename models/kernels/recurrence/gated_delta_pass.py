"""The second part of the gated delta rule in chunks: from chunk to chunk, with the state.

V' = U - W S; o = (e^c Q) S + tril(Q K^T * D) V'; S <- e^(c_64) S + (e^(c_64 - c) K)^T V'. See
gated_delta_chunks for the rest.

A program has 64 columns and its loop is not pipelined: with 32 columns Triton 3.6 builds wrong
outputs and addresses for Hopper, of some sizes even in one stage; with 64, all comparisons with
float64 hold.
"""

from functools import lru_cache
from typing import Any, NamedTuple

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
from models.kernels.recurrence.chunks import CHUNK, MOST_STEP, load_rows
from models.kernels.recurrence.gated_delta_step import DeltaHeads
from models.kernels.recurrence.state_rows import (
    StateForm,
    recurrent_form,
    request_span,
    row_offset,
)
from models.state_cache import StateCacheData

_COLUMNS = 64
"""Columns of the state that a program has."""
_CHUNK = tl.constexpr(CHUNK)

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_blocks",
    "num_tokens", "least_tokens",
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
    qkv_ptr, prepared, output_ptr, memory_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr,
    qkv_stride, table_stride, num_blocks, num_tokens, least_tokens, form: tl.constexpr,
    heads: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does all chunks of a request of at least least_tokens, for COLUMNS of a head's state."""
    let_next_start(DEPENDENT)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    request = tl.program_id(2)
    dims = tl.arange(0, heads.block_k)
    mask = (dims < heads.k_dim)[:, None] & (columns < heads.v_dim)[None, :]
    at_head = head.to(tl.int64) * num_tokens
    reads_ptr = prepared.reads + at_head * heads.k_dim
    writes_ptr = prepared.writes + at_head * heads.v_dim
    scores_ptr = prepared.scores + at_head * _CHUNK
    q_ptr, k_ptr = _queries_and_keys(qkv_ptr, prepared, head, at_head, heads)
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
            at = at_head + tokens
            places = tl.arange(0, _CHUNK)
            # All of a chunk's loads are under way before its first product.
            reads = load_rows(reads_ptr, tokens, heads.k_dim, in_chunk, dims, heads.k_dim)
            writes = load_rows(writes_ptr, tokens, heads.v_dim, in_chunk, columns, heads.v_dim)
            q = load_rows(q_ptr, tokens, stride, in_chunk, dims, heads.k_dim)
            scores = load_rows(scores_ptr, tokens, _CHUNK, in_chunk, places, _CHUNK)
            k = load_rows(k_ptr, tokens, stride, in_chunk, dims, heads.k_dim)
            q_factors = _load_factors(prepared.q_factors, at, in_chunk)
            k_factors = _load_factors(prepared.k_factors, at, in_chunk)
            rounded = state.to(reads.dtype)
            values = writes.to(tl.float32) - tl.dot(reads, rounded)
            output = tl.dot(q, rounded) * q_factors
            output += tl.dot(scores, values.to(scores.dtype))
            out_ptrs = output_ptr + tokens.to(tl.int64)[:, None] * (heads.num_heads * heads.v_dim)
            out_mask = in_chunk[:, None] & (columns < heads.v_dim)[None, :]
            output = output.to(output_ptr.dtype.element_ty)
            tl.store(out_ptrs + (head * heads.v_dim + columns)[None, :], output, mask=out_mask)
            added = (values * k_factors).to(k.dtype)
            last = tl.minimum(first + _CHUNK, end) - 1
            state *= _decay_of(prepared, at_head, first, last, dims, heads)
            state += tl.dot(tl.trans(k), added)
        tl.store(state_ptrs, state.to(memory_ptr.dtype.element_ty), mask=mask & keeps)


def pass_chunks(
    qkv: torch.Tensor,
    prepared: Prepared,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    heads: DeltaHeads,
) -> None:
    """Computes outputs and states of requests of more than MOST_STEP query tokens."""
    tables = metadata.block_tables
    _launcher(recurrent_form(cache, rounds=False), heads, qkv.device)(
        (-(-heads.v_dim // _COLUMNS), heads.num_heads, len(metadata.seq_lens)),
        qkv, prepared, output, cache.memory.view(cache.spec.dtype), tables, metadata.seq_lens,
        metadata.query_start_loc, qkv.stride(0), tables.stride(0), cache.num_blocks, len(qkv),
        MOST_STEP + 1,
    )  # fmt: skip


@lru_cache
def _launcher(form: StateForm, heads: DeltaHeads, device: torch.device) -> Launch:
    return Launch(
        _pass_delta_chunks_kernel, form=form, heads=heads, COLUMNS=_COLUMNS, num_warps=4,
        num_stages=1, **launch_options(device),
    )  # fmt: skip
