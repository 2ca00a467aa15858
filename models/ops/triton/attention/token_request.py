"""Which request a token belongs to, found on the device."""

import triton
import triton.language as tl


@triton.jit
def request_of(token, query_start_ptr, num_requests):
    """Returns the last request that starts at or before a token."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) <= token:
            low = middle
        else:
            high = middle
    return low
