"""Chooses between the two forms of latent attention, from shapes alone.

The absorbed form attends to latent vectors themselves; the expanded form first makes each head's
keys and values of them, which takes less arithmetic for each query and more for each key.
"""

import sys

from models.config_sections.mla import MlaConfig
from models.operands.latent_queries import LatentSizes

_MEASURED: dict[LatentSizes, int] = {}
"""Least query tokens that the expanded form takes less time for, after contexts of any length.

tests.bench.latent_forms measures them; a size without an entry goes by its arithmetic.
"""

NEVER = sys.maxsize
"""More query tokens than any request has."""

MOST_EXPANDED_BYTES = 2**28
"""Most memory of keys and values that are expanded at once: 4096 tokens of DeepSeek-V3's 128 heads.

Pieces of keys follow each other; each adds to the softmax of those before.
"""


def least_expanded_queries(sizes: LatentSizes) -> int:
    """Returns how many query tokens of one request take the expanded form; NEVER if none do.

    By default from where its arithmetic is less whatever the context. A query and a key take
    2 * (2C + P) operations of a head with latent vectors and 2 * (N + P + V) with keys and values;
    these take 2 * C * (N + V) for each key.
    """
    saved = 2 * sizes.latent - sizes.plain - sizes.value
    if saved <= 0:
        return NEVER
    by_arithmetic = -(-sizes.latent * (sizes.plain + sizes.value) // saved)
    return _MEASURED.get(sizes, by_arithmetic)


def keys_at_once(sizes: LatentSizes, *, num_heads: int, itemsize: int, block_size: int) -> int:
    """Returns how many keys are expanded at once: whole blocks of `block_size` tokens."""
    bytes_per_block = block_size * num_heads * (sizes.plain + sizes.value) * itemsize
    return max(1, MOST_EXPANDED_BYTES // bytes_per_block) * block_size


def steps_of_each_form(mla: MlaConfig, many_tokens: int) -> list[tuple[int, ...]]:
    """Returns the prompt lengths of steps that take each form with few and with many tokens.

    many_tokens: from this many on the absorbed form has another kernel.
    """
    sizes = LatentSizes(
        latent=mla.kv_lora_rank,
        rotated=mla.qk_rope_head_dim,
        plain=mla.qk_nope_head_dim,
        value=mla.v_head_dim,
    )
    least = least_expanded_queries(sizes)
    if least == NEVER or mla.index is not None:
        return []
    short = max(1, min(least - 1, many_tokens))
    return [(least,), (short,) * -(-many_tokens // short)]
