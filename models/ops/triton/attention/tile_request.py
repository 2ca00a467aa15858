"""Which request a tile of queries belongs to, read on the device."""

import triton
import triton.language as tl


@triton.jit
def request_of_tile(tile, query_start_ptr, num_requests, QUERIES: tl.constexpr):
    """Returns the request that a tile of QUERIES neighbouring tokens belongs to.

    Each request's tiles start at query_start // QUERIES + its number: enough for the worst case
    that every request ends in a tile of one query. So the map needs no work on the host.
    """
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low
