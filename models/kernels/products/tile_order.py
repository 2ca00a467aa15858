"""The order of the tiles of products of many tokens."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_NEIGHBOURS = gl.constexpr(8)
"""Tiles of tokens that are multiplied with the same weights at the same time."""


@gluon.jit
def place_of(tile, counts):
    """Returns a tile's row and column among the tiles of rows and of tokens."""
    num_row_tiles, num_token_tiles, _ = counts
    first = tile // (num_row_tiles * _NEIGHBOURS) * _NEIGHBOURS
    width = gl.minimum(num_token_tiles - first, _NEIGHBOURS)
    within = tile - num_row_tiles * first
    return within // width, first + within % width


@gluon.jit
def first_token_of(token_tile, TOKENS: gl.constexpr, num_tokens, ALIGNMENT: gl.constexpr = 1):
    """Returns a tile's first token; the last tile of several overlaps the one before it.

    Loading tokens past the end is slow: a product of 80 tokens in tiles of 64 took 97 us instead of
    the 73 of 128 tokens (H200, 2026-11). Where tiles begin at multiples of ALIGNMENT, the last one
    ends with the last token or up to ALIGNMENT - 1 past it.
    """
    last = gl.maximum(num_tokens - TOKENS, 0)
    last = (last + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return gl.minimum(token_tile * TOKENS, last)
