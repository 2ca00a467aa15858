"""Finds on the device which request a token or a tile of queries belongs to."""

import triton
import triton.language as tl


@triton.jit
def request_of(token, query_start_ptr, num_requests):
    """Returns the last request that starts at or before a token."""
    return _last_started(token, query_start_ptr, num_requests, 0)


@triton.jit
def request_of_tile(tile, query_start_ptr, num_requests, QUERIES: tl.constexpr):
    """Returns the request that a tile of QUERIES neighbouring tokens belongs to.

    The first tile of request i is query_start // QUERIES + i. That leaves room for the worst case,
    in which every request ends in a tile of one query, and needs no work on the host.
    """
    return _last_started(tile, query_start_ptr, num_requests, QUERIES)


@triton.jit
def _last_started(at, query_start_ptr, num_requests, QUERIES: tl.constexpr):
    """Returns the last request that starts at or before token, or if QUERIES > 0 tile, `at`."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_start_ptr + middle)
        if QUERIES > 0:
            start = start // QUERIES + middle
        if start <= at:
            low = middle
        else:
            high = middle
    return low
