"""The gated delta rule, chunks of 64 tokens at a time: products instead of a loop over tokens.

In a chunk, with c the sums of g, D_ij = e^(c_i - c_j) for j <= i and T = (I + tril_-1(beta K K^T
* D))^-1, U = T (beta V) and W = T (beta e^c K) do not depend on the state: a first kernel computes
these of all chunks. A second one goes from chunk to chunk: V' = U - W S; o = (e^c Q) S + tril(Q K^T
* D) V'; S <- e^(c_64) S + (e^(c_64 - c) K)^T V'.

Queries and keys enter products as they are, not normalised, as their lengths are factors of rows.
No operand is a transposed result of a product: Triton 3.4 to 3.7 miscompiles that on Hopper
(fla-org/flash-linear-attention, issue 640). Nor does a product add to a scaled result: with Triton
3.6, four warps and 32 columns that gave outputs of no use and wrong addresses on an H200.

Source: arXiv 2412.06464, section 3.3.
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
from models.kernels.recurrence.chunks import (
    CHUNK,
    MOST_STEP,
    decay_between,
    find_chunk,
    load_rows,
    num_chunks,
    store_rows,
    unit_inverse,
)
from models.kernels.recurrence.gated_delta_step import DeltaHeads
from models.kernels.recurrence.gates import sigmoid, softplus
from models.kernels.recurrence.state_rows import (
    StateForm,
    recurrent_form,
    request_span,
    row_offset,
)
from models.state_cache import StateCacheData

_COLUMNS = 32
"""Columns of the state that a program of the second kernel has."""
_CHUNK = tl.constexpr(CHUNK)
_INVERSE_PRECISION = tl.constexpr("tf32x3")

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_blocks",
    "num_requests", "num_tokens", "least_tokens", "decays_ptr",
]  # fmt: skip  # specialising on these would compile again while serving


class Prepared(NamedTuple):
    """Results of the first kernel.

    writes: U, [H, T, Dv]. reads: W, [H, T, Dk]. scores: tril(Q K^T * D), [H, T, 64]; all of qkv's
    dtype.
    q_factors, k_factors: [H, T] float32, of rows of Q S and of V' as it is added to the state.
    decays: [H, T] float32, of the state over a chunk, at its first token.
    """

    writes: Any
    reads: Any
    scores: Any
    q_factors: Any
    k_factors: Any
    decays: Any


@triton.jit
def _inverse_length(x):
    """Returns the factor that normalises each row, in float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit(do_not_specialize=_VARYING)
def _prepare_delta_chunks_kernel(
    qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, prepared, query_start_ptr, qkv_stride, a_stride,
    b_stride, num_tokens, num_requests, least_tokens, scale, heads: tl.constexpr,
    BLOCK_V: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Prepares one chunk of a head of values."""
    let_next_start(DEPENDENT)
    head = tl.program_id(0)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    wait_for_previous(DEPENDENT)
    first, last = find_chunk(tl.program_id(1), query_start_ptr, num_requests, least_tokens)
    if first < last:
        tokens = first + tl.arange(0, _CHUNK)
        in_chunk = tokens < last
        dims = tl.arange(0, heads.block_k)
        q_ptr = qkv_ptr + head // (heads.num_heads // heads.num_k_heads) * heads.k_dim
        k_ptr = q_ptr + heads.num_k_heads * heads.k_dim
        v_ptr = qkv_ptr + 2 * heads.num_k_heads * heads.k_dim + head * heads.v_dim
        at = tokens.to(tl.int64)
        a = tl.load(a_ptr + at * a_stride + head, mask=in_chunk, other=0.0).to(tl.float32)
        logs = tl.where(in_chunk, rate * softplus(a + dt_bias), 0.0)
        sums, total = tl.cumsum(logs, 0), tl.sum(logs, 0)
        b = tl.load(b_ptr + at * b_stride + head, mask=in_chunk, other=0.0).to(tl.float32)
        beta = tl.where(in_chunk, sigmoid(b), 0.0)
        q = load_rows(q_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
        k = load_rows(k_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
        q_norm, k_norm = _inverse_length(q) * scale, _inverse_length(k)
        at_head = head.to(tl.int64) * num_tokens
        at += at_head
        tl.store(prepared.q_factors + at, q_norm * tl.exp(sums), mask=in_chunk)
        tl.store(prepared.k_factors + at, k_norm * tl.exp(total - sums), mask=in_chunk)
        tl.store(prepared.decays + at_head + first, tl.exp(total))
        scores = tl.dot(q, tl.trans(k)) * q_norm[:, None] * k_norm[None, :]
        scores *= decay_between(sums, False)
        scores_ptr = prepared.scores + at_head * _CHUNK
        store_rows(scores_ptr, tokens, scores, in_chunk, tl.arange(0, _CHUNK), _CHUNK)
        products = tl.dot(k, tl.trans(k)) * (beta * k_norm)[:, None] * k_norm[None, :]
        inverse = unit_inverse(products * decay_between(sums, True), _INVERSE_PRECISION)
        v_dims = tl.arange(0, BLOCK_V)
        v = load_rows(v_ptr, tokens, qkv_stride, in_chunk, v_dims, heads.v_dim)
        writes = tl.dot((inverse * beta[None, :]).to(v.dtype), v)
        writes_ptr = prepared.writes + at_head * heads.v_dim
        store_rows(writes_ptr, tokens, writes, in_chunk, v_dims, heads.v_dim)
        # Loaded again, as the inverse needs the registers.
        k = load_rows(k_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
        factors = beta * tl.exp(sums) * k_norm
        reads = tl.dot((inverse * factors[None, :]).to(k.dtype), k)
        reads_ptr = prepared.reads + at_head * heads.k_dim
        store_rows(reads_ptr, tokens, reads, in_chunk, dims, heads.k_dim)


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
    q_ptr = qkv_ptr + head // (heads.num_heads // heads.num_k_heads) * heads.k_dim
    k_ptr = q_ptr + heads.num_k_heads * heads.k_dim
    at_head = head.to(tl.int64) * num_tokens
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
            reads_ptr = prepared.reads + at_head * heads.k_dim
            reads = load_rows(reads_ptr, tokens, heads.k_dim, in_chunk, dims, heads.k_dim)
            writes_ptr = prepared.writes + at_head * heads.v_dim
            writes = load_rows(writes_ptr, tokens, heads.v_dim, in_chunk, columns, heads.v_dim)
            rounded = state.to(reads.dtype)
            values = writes.to(tl.float32) - tl.dot(reads, rounded)
            q = load_rows(q_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
            at = at_head + tokens
            q_factor = tl.load(prepared.q_factors + at, mask=in_chunk, other=0.0)
            output = tl.dot(q, rounded) * q_factor[:, None]
            scores_ptr = prepared.scores + at_head * _CHUNK
            places = tl.arange(0, _CHUNK)
            scores = load_rows(scores_ptr, tokens, _CHUNK, in_chunk, places, _CHUNK)
            output += tl.dot(scores, values.to(scores.dtype))
            width = heads.num_heads * heads.v_dim
            out_ptrs = output_ptr + tokens.to(tl.int64)[:, None] * width + head * heads.v_dim
            out_mask = in_chunk[:, None] & (columns < heads.v_dim)[None, :]
            out = output.to(output_ptr.dtype.element_ty)
            tl.store(out_ptrs + columns[None, :], out, mask=out_mask)
            k = load_rows(k_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
            k_factor = tl.load(prepared.k_factors + at, mask=in_chunk, other=0.0)
            added = (values * k_factor[:, None]).to(k.dtype)
            state *= tl.load(prepared.decays + at_head + first)
            state += tl.dot(tl.trans(k), added)
        tl.store(state_ptrs, state.to(memory_ptr.dtype.element_ty), mask=mask & keeps)


def gated_delta_chunks(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    heads: DeltaHeads,
) -> None:
    """Runs gated_delta_rule for requests of more than MOST_STEP query tokens; qkv has 16 bits."""
    num_tokens, num_requests = len(qkv), len(metadata.seq_lens)
    sizes = (heads.v_dim, heads.k_dim, CHUNK)
    matrices = [qkv.new_empty((heads.num_heads, num_tokens, size)) for size in sizes]
    # Three allocations, as builds depend on alignments.
    factors = (qkv.new_empty(matrices[0].shape[:2], dtype=torch.float32) for _ in range(3))
    prepared = Prepared(*matrices, *factors)
    prepare, pass_on = _launchers(recurrent_form(cache, rounds=False), heads, qkv.device)
    prepare(
        (heads.num_heads, num_chunks(num_tokens, num_requests), 1),
        qkv, a, b, a_log, dt_bias, prepared, metadata.query_start_loc, qkv.stride(0), a.stride(0),
        b.stride(0), num_tokens, num_requests, MOST_STEP + 1, heads.k_dim**-0.5,
    )  # fmt: skip
    tables = metadata.block_tables
    pass_on(
        (-(-heads.v_dim // _COLUMNS), heads.num_heads, num_requests),
        qkv, prepared, output, cache.memory.view(cache.spec.dtype), tables, metadata.seq_lens,
        metadata.query_start_loc, qkv.stride(0), tables.stride(0), cache.num_blocks, num_tokens,
        MOST_STEP + 1,
    )  # fmt: skip


@lru_cache
def _launchers(form: StateForm, heads: DeltaHeads, device: torch.device) -> tuple[Launch, Launch]:
    """Returns the first kernel and the second."""
    heads = heads._replace(block_k=max(16, heads.block_k))
    block_v = max(16, triton.next_power_of_2(heads.v_dim))
    prepare = Launch(
        _prepare_delta_chunks_kernel, heads=heads, BLOCK_V=block_v, num_warps=4, num_stages=1,
        **launch_options(device),
    )  # fmt: skip
    pass_on = Launch(
        _pass_delta_chunks_kernel, form=form, heads=heads, COLUMNS=_COLUMNS, num_warps=4,
        num_stages=1, **launch_options(device),
    )  # fmt: skip
    return prepare, pass_on
