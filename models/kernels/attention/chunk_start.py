"""Where the keys begin that a query sees in attention within chunks of positions."""

import triton
import triton.language as tl


@triton.jit
def chunk_start(position, WINDOW: tl.constexpr):
    """Returns the first position of the chunk of -WINDOW positions that a position is in.

    Positions before the first, of requests without keys, give 0.
    """
    return tl.maximum(position, 0) // -WINDOW * -WINDOW
