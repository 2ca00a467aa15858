"""Tile sizes of attention in batch-invariant mode, in tables."""

import torch

from models.kernels.attention.configurations import Tiles, look_up

PART = 512
"""Keys of a part in batch-invariant mode; a multiple of every tile."""

LANES = 16
"""Sums of a row's exact weights that are kept apart, each of every LANES-th key.

Tensor cores spread a row over four threads, which hold two neighbours of every eight columns, or
over two warps of such threads.
"""

_INVARIANT = {
    (2, 64): Tiles(rows=64, keys=64, num_warps=4, num_stages=2, is_exact=True),
    (2, 128): Tiles(rows=64, keys=64, num_warps=4, num_stages=2, is_exact=True),
    (2, 256): Tiles(rows=64, keys=32, num_warps=8, num_stages=2),
    (2, 512): Tiles(rows=32, keys=32, num_warps=8, num_stages=2),
    (4, 64): Tiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 128): Tiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 256): Tiles(rows=16, keys=16, num_warps=4, num_stages=1),
    (4, 512): Tiles(rows=16, keys=16, num_warps=4, num_stages=1),
}
"""For all tokens of batch-invariant mode, except where the next two tables say more.

A prompt of 8192 tokens took 2.00 ms; with three stages 2.35 ms, with 128 rows and eight warps 2.17
ms (H200, 32 heads, 8 kv heads of 128, 2026-11).
"""

_INVARIANT_MANY = Tiles(rows=16, keys=64, num_warps=2, num_stages=2, is_exact=True)
"""For few tokens of each of many requests, of two bytes in heads of up to 128.

Keys of an 8-bit cache keep _INVARIANT: tensor cores take converted keys in another order where they
multiply few rows. Single tokens of 1, 8, 32, 128 and 256 requests with 280 keys took
11.3, 13.7, 19.7, 51.3 and 90.8 us; with _INVARIANT 8.7, 12.3, 16.9, 60.5 and 110 (H200, 32 heads, 8
kv heads of 128, 2026-11).
"""

MANY_INVARIANT_PAIRS = 256
"""From more requests times kv heads on, _INVARIANT_MANY is faster."""

_INVARIANT_MOST = Tiles(rows=16, keys=16, num_warps=1, num_stages=3, is_exact=True)
"""The same for more requests, in bfloat16: see _HOPPER_PARTS.

Single tokens of 32, 128 and 256 requests with 300 keys took 27.9, 58.5 and 113 us, with
_INVARIANT_MANY 18.1, 62.5 and 119 (H100, 32 heads, 8 kv heads of 128, 2026-11).
"""

MOST_INVARIANT_PAIRS = 512
"""From more requests times kv heads on, _INVARIANT_MOST is faster."""


def invariant_tiles(
    dtype: torch.dtype, cache_dtype: torch.dtype, padded_head_dim: int, *, num_pairs: int
) -> Tiles:
    """Returns the tiles of invariant_parts; num_pairs: requests times kv heads.

    Raises:
        ValueError: no kernel takes such heads.
    """
    is_plain = dtype.itemsize == 2 and cache_dtype is dtype and padded_head_dim <= 128
    if is_plain and dtype is torch.bfloat16 and num_pairs > MOST_INVARIANT_PAIRS:
        return _INVARIANT_MOST
    if is_plain and num_pairs > MANY_INVARIANT_PAIRS:
        return _INVARIANT_MANY
    return look_up(_INVARIANT, dtype, padded_head_dim)
