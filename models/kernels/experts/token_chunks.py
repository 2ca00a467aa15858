"""Cuts a step's tokens into chunks, so that experts need bounded memory."""

from collections.abc import Iterator

from models.number_formats import BLOCK
from models.operands.experts import ExpertWeights

MOST_SCRATCH_BYTES = 480_000_000
"""Most memory of the values between a chunk's first product and its sum, the result not counted.

Every chunk reads the weights of its experts once more, so larger chunks are faster: 480 MB are 3072
tokens of DeepSeek-V3, whose experts then have 96 rows each.
"""

CHUNK_MULTIPLE = 128
"""Chunks begin at multiples of this: kernels are built for addresses that 16 divides."""


def token_chunks(
    num_tokens: int, *, top_k: int, itemsize: int, experts: ExpertWeights
) -> Iterator[slice]:
    """Yields the chunks of a step, about equal; one if all tokens fit.

    top_k: experts of each token. itemsize: bytes of an element of the activations.
    """
    most = MOST_SCRATCH_BYTES // scratch_bytes(1, top_k=top_k, itemsize=itemsize, experts=experts)
    most = max(1, most // CHUNK_MULTIPLE) * CHUNK_MULTIPLE
    count = -(-num_tokens // most)
    size = num_tokens
    if count > 1:
        size = -(-num_tokens // (count * CHUNK_MULTIPLE)) * CHUNK_MULTIPLE
    for first in range(0, num_tokens, size):
        yield slice(first, min(first + size, num_tokens))


def scratch_bytes(num_tokens: int, *, top_k: int, itemsize: int, experts: ExpertWeights) -> int:
    """Returns the memory that a chunk needs besides its result."""
    hidden, inner = experts.down.shape[1], experts.inner_size
    order = 8 if experts.is_fp8 else 4
    pair = (inner + hidden) * itemsize + order
    if experts.adapters is not None:
        # The inputs of pairs, and results that are not fused with the gate, also in float32.
        pair += hidden * itemsize + experts.num_parts * inner * (itemsize + 8)
    # A row in FP8, with its scales; on Hopper one of each pair, whose results then take its memory.
    # The inner features in FP8 need less than in the model's dtype.
    token = hidden + 4 * -(-hidden // BLOCK) if experts.is_fp8 else 0
    return num_tokens * (top_k * pair + token)
