"""Chunks of a request's tokens, for rules in which a chunk's tokens are computed together."""

import triton
import triton.language as tl

from models.kernels.attention.request_search import request_of_tile

CHUNK = 64
"""Tokens of a chunk, counted from a request's first token of the step."""
LEAST_TILE = 64
"""Elements of keys and of values that a tile of a chunk has, of which heads may fill a part: with
16 and 32 Triton 3.6 builds wrong chunks for Hopper."""
MOST_STEP = 16
"""Query tokens of a request up to which its tokens are computed one after the other."""

_CHUNK = tl.constexpr(CHUNK)
_BLOCK = tl.constexpr(16)
_BLOCKS = tl.constexpr(CHUNK // 16)


def num_chunks(num_tokens: int, num_requests: int) -> int:
    """Returns the programs that find a chunk, or none, by `find_chunk`."""
    return num_tokens // CHUNK + num_requests


@triton.jit
def find_chunk(program, query_start_ptr, num_requests, least_tokens):
    """Returns first and last token of a program's chunk, the latter excluded; equal for none.

    Requests of fewer than least_tokens have no chunks.
    """
    request = request_of_tile(program, query_start_ptr, num_requests, _CHUNK)
    start = tl.load(query_start_ptr + request)
    end = tl.load(query_start_ptr + request + 1)
    first = start + (program - start // _CHUNK - request) * _CHUNK
    last = tl.minimum(first + _CHUNK, end)
    if end - start < least_tokens:
        last = first
    return first, tl.maximum(first, last)


@triton.jit
def load_rows(ptr, tokens, stride, in_chunk, dims, SIZE: tl.constexpr):
    """Returns a head's vectors of the tokens of a chunk."""
    ptrs = ptr + tokens.to(tl.int64)[:, None] * stride + dims[None, :]
    return tl.load(ptrs, mask=in_chunk[:, None] & (dims < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, tokens, values, in_chunk, dims, SIZE: tl.constexpr):
    """Stores vectors of SIZE elements, side by side."""
    ptrs = ptr + tokens.to(tl.int64)[:, None] * SIZE + dims[None, :]
    mask = in_chunk[:, None] & (dims < SIZE)[None, :]
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def inverse_length(x):
    """Returns the factor that normalises each row, in float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def decay_between(sums, IS_STRICT: tl.constexpr):
    """Returns e^(c_i - c_j), [N, N], for j <= i, or j < i if strict; else 0. sums: c, [N]."""
    row = tl.arange(0, _CHUNK)[:, None]
    column = tl.arange(0, _CHUNK)[None, :]
    is_seen = column < row if IS_STRICT else column <= row
    difference = tl.minimum(sums[:, None] - sums[None, :], 0.0)
    return tl.where(is_seen, tl.exp(difference), 0.0)


@triton.jit
def unit_inverse(a, PRECISION: tl.constexpr):
    """Returns (I + a)^-1 of a strictly lower triangular matrix [64, 64], in float32.

    Diagonal blocks of 16 by substitution, which no large powers of `a` enter; the others by
    products: with N = D^-1 (a - blocks), nilpotent in blocks, it is (I - N + N^2 - N^3) D^-1.
    """
    row = tl.arange(0, _CHUNK)[:, None]
    column = tl.arange(0, _CHUNK)[None, :]
    blocks = tl.reshape(a, (_BLOCKS, _BLOCK, _BLOCKS, _BLOCK))
    number = tl.arange(0, _BLOCKS)
    is_diagonal = number[:, None, None, None] == number[None, None, :, None]
    inverse = -tl.sum(tl.where(is_diagonal, blocks, 0.0), 2)
    place = tl.arange(0, _BLOCK)[None, :, None]
    for index in range(1, _BLOCK):
        is_row = place == index
        values = tl.sum(tl.where(is_row, inverse, 0.0), 1)
        values += tl.sum(values[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, values[:, None, :], inverse)
    inverse = tl.where(is_diagonal, inverse[:, :, None, :], 0.0)
    unit = (row == column).to(tl.float32)
    inverse = tl.reshape(inverse, (_CHUNK, _CHUNK)) + unit
    rest = tl.where(row // _BLOCK > column // _BLOCK, a, 0.0)
    powers = tl.dot(inverse, rest, input_precision=PRECISION)
    square = tl.dot(powers, powers, input_precision=PRECISION)
    series = unit - powers + square - tl.dot(powers, square, input_precision=PRECISION)
    return tl.dot(series, inverse, input_precision=PRECISION)
