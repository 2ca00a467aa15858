"""The gated delta rule in chunks, with a decay of each channel of k (Kimi Delta Attention).

D is then inside the products: (K K^T)_ij = sum_d k_id k_jd e^(c_id - c_jd), j <= i. No factor of
these may overflow, so they are computed by blocks of 16 tokens. For a block of rows and one of
earlier columns, with r the sums c before the rows, it is a product of e^(c - r) K and e^(r - c) K;
on the diagonal it is summed element by element.

Source: arXiv 2510.26692.
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
    find_chunk,
    inverse_length,
    load_rows,
    num_chunks,
    store_rows,
    unit_inverse,
)
from models.kernels.recurrence.gated_delta_pass import Prepared
from models.kernels.recurrence.gated_delta_step import DeltaHeads
from models.kernels.recurrence.gates import log_decay, sigmoid

_CHUNK = tl.constexpr(CHUNK)
_BLOCK = tl.constexpr(16)
_BLOCKS = CHUNK // 16
_INVERSE_PRECISION = tl.constexpr("tf32x3")

_VARYING = ["query_start_ptr", "num_requests", "num_tokens", "least_tokens"]
"""Specialising on these would compile again while serving."""


@triton.jit
def _load_normalised(ptr, tokens, stride, in_chunk, dims, SIZE: tl.constexpr):
    """Returns vectors by their lengths, in float32."""
    x = load_rows(ptr, tokens, stride, in_chunk, dims, SIZE)
    return x.to(tl.float32) * inverse_length(x)[:, None]


@triton.jit(do_not_specialize=_VARYING)
def _scale_channels_kernel(
    qkv_ptr, a_ptr, a_log_ptr, dt_bias_ptr, prepared, query_start_ptr, qkv_stride, a_stride,
    num_tokens, num_requests, least_tokens, scale, heads: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes the sums c of a chunk, and queries and keys with their decays."""
    let_next_start(DEPENDENT)
    head = tl.program_id(0)
    dims = tl.arange(0, heads.block_k)
    is_dim = dims < heads.k_dim
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head * heads.k_dim + dims, mask=is_dim, other=0.0)
    wait_for_previous(DEPENDENT)
    first, last = find_chunk(tl.program_id(1), query_start_ptr, num_requests, least_tokens)
    if first < last:
        tokens = first + tl.arange(0, _CHUNK)
        in_chunk = tokens < last
        a = load_rows(a_ptr + head * heads.k_dim, tokens, a_stride, in_chunk, dims, heads.k_dim)
        gate = a.to(tl.float32) + dt_bias.to(tl.float32)[None, :]
        logs = log_decay(rate, gate, heads.decay_floor)
        logs = tl.where(in_chunk[:, None], logs, 0.0)
        sums, total = tl.cumsum(logs, 0), tl.sum(logs, 0)
        at = head.to(tl.int64) * num_tokens * heads.k_dim
        store_rows(prepared.sums + at, tokens, sums, in_chunk, dims, heads.k_dim)
        q_ptr = qkv_ptr + head // (heads.num_heads // heads.num_k_heads) * heads.k_dim
        q = _load_normalised(q_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
        q *= scale * tl.exp(sums)
        store_rows(prepared.queries + at, tokens, q, in_chunk, dims, heads.k_dim)
        k_ptr = q_ptr + heads.num_k_heads * heads.k_dim
        k = _load_normalised(k_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
        k *= tl.exp(total[None, :] - sums)
        store_rows(prepared.keys + at, tokens, k, in_chunk, dims, heads.k_dim)


@triton.jit
def _diagonal_block(
    q, k, sums, k_ptr, sums_ptr, qkv_stride, first, last, dims, heads: tl.constexpr
):
    """Returns the products of a block's queries and keys with its own keys, with their decays."""
    column = tl.arange(0, _BLOCK)[None, :]
    scores = tl.zeros((_BLOCK, _BLOCK), tl.float32)
    products = tl.zeros((_BLOCK, _BLOCK), tl.float32)
    for index in range(_BLOCK):
        token = first.to(tl.int64) + index
        mask = (dims < heads.k_dim) & (token < last)
        key = tl.load(k_ptr + token * qkv_stride + dims, mask=mask, other=0.0).to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        own = tl.load(sums_ptr + token * heads.k_dim + dims, mask=mask, other=0.0)
        decayed = tl.exp(tl.minimum(sums - own[None, :], 0.0)) * key[None, :]
        scores = tl.where(column == index, tl.sum(q * decayed, 1)[:, None], scores)
        products = tl.where(column == index, tl.sum(k * decayed, 1)[:, None], products)
    return scores, products


@triton.jit(do_not_specialize=_VARYING)
def _score_channels_kernel(
    qkv_ptr, b_ptr, links_ptr, prepared, query_start_ptr, qkv_stride, b_stride, num_tokens,
    num_requests, least_tokens, scale, heads: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes 16 rows of scores and of `links`, beta K K^T below the diagonal, for a chunk."""
    let_next_start(DEPENDENT)
    block = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, heads.block_k)
    wait_for_previous(DEPENDENT)
    start, last = find_chunk(tl.program_id(2), query_start_ptr, num_requests, least_tokens)
    first = start + block * _BLOCK
    if first < last:
        place = tl.arange(0, _BLOCK)
        tokens = first + place
        in_chunk = tokens < last
        q_ptr = qkv_ptr + head // (heads.num_heads // heads.num_k_heads) * heads.k_dim
        k_ptr = q_ptr + heads.num_k_heads * heads.k_dim
        at_head = head.to(tl.int64) * num_tokens
        sums_ptr = prepared.sums + at_head * heads.k_dim
        q = _load_normalised(q_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim) * scale
        k = _load_normalised(k_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
        b_ptrs = b_ptr + tokens.to(tl.int64) * b_stride + head
        beta = sigmoid(tl.load(b_ptrs, mask=in_chunk, other=0.0).to(tl.float32)) * heads.beta_scale
        sums = load_rows(sums_ptr, tokens, heads.k_dim, in_chunk, dims, heads.k_dim)
        scores, products = _diagonal_block(
            q, k, sums, k_ptr, sums_ptr, qkv_stride, first, last, dims, heads
        )
        scores = tl.where(place[None, :] <= place[:, None], scores, 0.0)
        products = tl.where(place[None, :] < place[:, None], products, 0.0) * beta[:, None]
        scores_ptr = prepared.scores + at_head * _CHUNK
        links_ptr += at_head * _CHUNK
        columns = block * _BLOCK + place
        store_rows(scores_ptr, tokens, scores, in_chunk, columns, _CHUNK)
        store_rows(links_ptr, tokens, products, in_chunk, columns, _CHUNK)
        dtype = qkv_ptr.dtype.element_ty
        mask = (dims < heads.k_dim) & (block > 0)
        before_ptrs = sums_ptr + (first.to(tl.int64) - 1) * heads.k_dim + dims
        before = tl.load(before_ptrs, mask=mask, other=0.0)[None, :]
        decay = tl.exp(sums - before)
        q, k = (q * decay).to(dtype), (k * decay).to(dtype)
        for other in range(_CHUNK // _BLOCK):
            columns = other * _BLOCK + place
            if other < block:
                tokens_k = start + columns
                is_key = tokens_k < last
                key = _load_normalised(k_ptr, tokens_k, qkv_stride, is_key, dims, heads.k_dim)
                own = load_rows(sums_ptr, tokens_k, heads.k_dim, is_key, dims, heads.k_dim)
                key = (key * tl.exp(before - own)).to(dtype)
                scores = tl.dot(q, tl.trans(key))
                products = tl.dot(k, tl.trans(key)) * beta[:, None]
                store_rows(scores_ptr, tokens, scores, in_chunk, columns, _CHUNK)
                store_rows(links_ptr, tokens, products, in_chunk, columns, _CHUNK)
            elif other > block:
                zeros = tl.zeros((_BLOCK, _BLOCK), tl.float32)
                store_rows(scores_ptr, tokens, zeros, in_chunk, columns, _CHUNK)
                store_rows(links_ptr, tokens, zeros, in_chunk, columns, _CHUNK)


@triton.jit(do_not_specialize=_VARYING)
def _solve_channels_kernel(
    qkv_ptr, b_ptr, links_ptr, prepared, query_start_ptr, qkv_stride, b_stride, num_tokens,
    num_requests, least_tokens, heads: tl.constexpr, BLOCK_V: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes U and W of a chunk."""
    let_next_start(DEPENDENT)
    head = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    first, last = find_chunk(tl.program_id(1), query_start_ptr, num_requests, least_tokens)
    if first < last:
        tokens = first + tl.arange(0, _CHUNK)
        in_chunk = tokens < last
        at_head = head.to(tl.int64) * num_tokens
        places = tl.arange(0, _CHUNK)
        links_ptr += at_head * _CHUNK
        links = load_rows(links_ptr, tokens, _CHUNK, in_chunk, places, _CHUNK)
        b_ptrs = b_ptr + tokens.to(tl.int64) * b_stride + head
        beta = sigmoid(tl.load(b_ptrs, mask=in_chunk, other=0.0).to(tl.float32)) * heads.beta_scale
        dtype = qkv_ptr.dtype.element_ty
        inverse = (unit_inverse(links, _INVERSE_PRECISION) * beta[None, :]).to(dtype)
        v_dims = tl.arange(0, BLOCK_V)
        v_ptr = qkv_ptr + 2 * heads.num_k_heads * heads.k_dim + head * heads.v_dim
        v = load_rows(v_ptr, tokens, qkv_stride, in_chunk, v_dims, heads.v_dim)
        writes_ptr = prepared.writes + at_head * heads.v_dim
        store_rows(writes_ptr, tokens, tl.dot(inverse, v), in_chunk, v_dims, heads.v_dim)
        dims = tl.arange(0, heads.block_k)
        k_ptr = qkv_ptr + head // (heads.num_heads // heads.num_k_heads) * heads.k_dim
        k_ptr += heads.num_k_heads * heads.k_dim
        k = _load_normalised(k_ptr, tokens, qkv_stride, in_chunk, dims, heads.k_dim)
        sums_ptr = prepared.sums + at_head * heads.k_dim
        sums = load_rows(sums_ptr, tokens, heads.k_dim, in_chunk, dims, heads.k_dim)
        reads = tl.dot(inverse, (k * tl.exp(sums)).to(dtype))
        reads_ptr = prepared.reads + at_head * heads.k_dim
        store_rows(reads_ptr, tokens, reads, in_chunk, dims, heads.k_dim)


def prepare_channels(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    metadata: AttentionMetadata,
    heads: DeltaHeads,
) -> Prepared:
    """Returns all that does not depend on states, of requests of more than MOST_STEP tokens."""
    num_tokens, num_requests = len(qkv), len(metadata.seq_lens)
    rows = (heads.num_heads, num_tokens)
    prepared = Prepared(
        writes=qkv.new_empty((*rows, heads.v_dim)),
        reads=qkv.new_empty((*rows, heads.k_dim)),
        scores=qkv.new_empty((*rows, CHUNK)),
        queries=qkv.new_empty((*rows, heads.k_dim)),
        keys=qkv.new_empty((*rows, heads.k_dim)),
        sums=qkv.new_empty((*rows, heads.k_dim), dtype=torch.float32),
    )
    links = qkv.new_empty((*rows, CHUNK), dtype=torch.float32)
    scale_channels, score, solve = _launchers(heads, qkv.device)
    chunks = num_chunks(num_tokens, num_requests)
    starts, scale = metadata.query_start_loc, heads.k_dim**-0.5
    counts = (num_tokens, num_requests, MOST_STEP + 1)
    scale_channels(
        (heads.num_heads, chunks, 1), qkv, a, a_log, dt_bias, prepared, starts, qkv.stride(0),
        a.stride(0), *counts, scale,
    )  # fmt: skip
    score(
        (_BLOCKS, heads.num_heads, chunks), qkv, b, links, prepared, starts, qkv.stride(0),
        b.stride(0), *counts, scale,
    )  # fmt: skip
    solve(
        (heads.num_heads, chunks, 1), qkv, b, links, prepared, starts, qkv.stride(0), b.stride(0),
        *counts,
    )  # fmt: skip
    return prepared


@lru_cache
def _launchers(heads: DeltaHeads, device: torch.device) -> tuple[Launch, Launch, Launch]:
    """Returns the kernels in order."""
    options = launch_options(device)
    scale = Launch(_scale_channels_kernel, heads=heads, num_warps=8, **options)
    score = Launch(_score_channels_kernel, heads=heads, num_warps=4, num_stages=1, **options)
    block_v = max(LEAST_TILE, triton.next_power_of_2(heads.v_dim))
    solve = Launch(
        _solve_channels_kernel, heads=heads, BLOCK_V=block_v, num_warps=4, num_stages=1, **options,
    )  # fmt: skip
    return scale, score, solve
