"""The gated delta rule, chunks of 64 tokens at a time: products instead of a loop over tokens.

In a chunk, with c the sums of g, D_ij = e^(c_i - c_j) for j <= i and T = (I + tril_-1(beta K K^T
* D))^-1, U = T (beta V) and W = T (beta e^c K) do not depend on the state: a first kernel computes
these of all chunks. gated_delta_pass then goes from chunk to chunk.

Queries and keys enter products as they are, not normalised, as their lengths are factors of rows.
No operand is a transposed result of a product: Triton 3.4 to 3.7 miscompiles that on Hopper
(fla-org/flash-linear-attention, issue 640).

Source: arXiv 2412.06464, section 3.3.
"""

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
from models.kernels.recurrence.chunks import (
    CHUNK,
    LEAST_TILE,
    MOST_STEP,
    decay_between,
    find_chunk,
    inverse_length,
    load_rows,
    num_chunks,
    store_rows,
    unit_inverse,
)
from models.kernels.recurrence.gated_delta_channels import prepare_channels
from models.kernels.recurrence.gated_delta_pass import Prepared, pass_chunks
from models.kernels.recurrence.gated_delta_step import DeltaHeads
from models.kernels.recurrence.gates import log_decay, sigmoid
from models.state_cache import StateCacheData

_CHUNK = tl.constexpr(CHUNK)

_VARYING = ["query_start_ptr", "num_requests", "num_tokens", "least_tokens"]
"""Specialising on these would compile again while serving."""


@triton.jit(do_not_specialize=_VARYING)
def _prepare_delta_chunks_kernel(
    qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, prepared, query_start_ptr, qkv_stride, a_stride,
    b_stride, num_tokens, num_requests, least_tokens, scale, heads: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Prepares one chunk of a head of values. PRECISION: of products of the inverse."""
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
        logs = tl.where(in_chunk, log_decay(rate, a + dt_bias, heads.decay_floor), 0.0)
        sums, total = tl.cumsum(logs, 0), tl.sum(logs, 0)
        b = tl.load(b_ptr + at * b_stride + head, mask=in_chunk, other=0.0).to(tl.float32)
        beta = tl.where(in_chunk, heads.beta_scale * sigmoid(b), 0.0)
        q = load_rows(q_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
        k = load_rows(k_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
        q_norm, k_norm = inverse_length(q) * scale, inverse_length(k)
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
        inverse = unit_inverse(products * decay_between(sums, True), PRECISION)
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
    heads = heads._replace(block_k=max(LEAST_TILE, heads.block_k))
    prepare = prepare_channels if heads.decays_channels else _prepare
    prepared = prepare(qkv, a, b, a_log, dt_bias, metadata, heads)
    pass_chunks(qkv, prepared, output, cache, metadata, heads)


def _prepare(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    metadata: AttentionMetadata,
    heads: DeltaHeads,
) -> Prepared:
    """Launches the first kernel; returns its results."""
    num_tokens, num_requests = len(qkv), len(metadata.seq_lens)
    rows = (heads.num_heads, num_tokens)
    matrices = (qkv.new_empty((*rows, size)) for size in (heads.v_dim, heads.k_dim, CHUNK))
    # Three allocations, as builds depend on alignments.
    factors = (qkv.new_empty(rows, dtype=torch.float32) for _ in range(3))
    prepared = Prepared(*matrices, *factors)
    _launcher(heads, qkv.device)(
        (heads.num_heads, num_chunks(num_tokens, num_requests), 1),
        qkv, a, b, a_log, dt_bias, prepared, metadata.query_start_loc, qkv.stride(0), a.stride(0),
        b.stride(0), num_tokens, num_requests, MOST_STEP + 1, heads.k_dim**-0.5,
    )  # fmt: skip
    return prepared


@lru_cache
def _launcher(heads: DeltaHeads, device: torch.device) -> Launch:
    return Launch(
        _prepare_delta_chunks_kernel, heads=heads,
        BLOCK_V=max(LEAST_TILE, triton.next_power_of_2(heads.v_dim)),
        PRECISION=_inverse_precision(heads), num_warps=4, num_stages=1, **launch_options(device),
    )  # fmt: skip


def _inverse_precision(heads: DeltaHeads) -> str:
    """Returns the precision of products that make the inverse, which is rounded to 16 bits.

    With equal keys and negative eigenvalues the error of tf32 grows to several per cent.
    """
    return "tf32" if heads.beta_scale <= 1.0 else "tf32x3"
