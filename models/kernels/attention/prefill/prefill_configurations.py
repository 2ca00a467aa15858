"""Tiles of prefill_attention, in tables."""

from dataclasses import replace
from functools import lru_cache

import torch

from models.kernels.attention.configurations import Tiles, look_up
from models.kernels.attention.fitting_keys import fitting_keys

_FIRST_CHUNK = {
    (2, 64): Tiles(rows=128, keys=64, num_warps=8, num_stages=3),
    (2, 128): Tiles(rows=128, keys=128, num_warps=8, num_stages=3),
    (2, 256): Tiles(rows=64, keys=64, num_warps=4, num_stages=3),
    (2, 512): Tiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 64): Tiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 128): Tiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 256): Tiles(rows=16, keys=16, num_warps=4, num_stages=1),
    (4, 512): Tiles(rows=16, keys=16, num_warps=4, num_stages=1),
}
"""For chunks that begin their sequence and attend to keys of this step only.

Smaller tiles are faster for short chunks (64 rows, 32 keys: 16 chunks of 512 tokens in 137 us
instead of 184) but slower for long ones (8192 tokens in 1128 us instead of 1031; H200, 32 heads, 8
kv heads of 128, 2026-11).
"""

_LATER_CHUNK = {
    (2, 64): Tiles(rows=128, keys=64, num_warps=4, num_stages=3),
    (2, 128): Tiles(rows=128, keys=64, num_warps=4, num_stages=3),
    (2, 256): Tiles(rows=64, keys=32, num_warps=4, num_stages=2),
    (2, 512): Tiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 64): Tiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 128): Tiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 256): Tiles(rows=16, keys=16, num_warps=4, num_stages=1),
    (4, 512): Tiles(rows=16, keys=16, num_warps=4, num_stages=1),
}


@lru_cache
def prefill_tiles(
    dtype: torch.dtype, padded_head_dim: int, *, has_prefix: bool, device: torch.device
) -> Tiles:
    """Returns the tiles of prefill attention, for chunks after cached tokens or without.

    Raises:
        ValueError: no kernel takes such heads.
    """
    tiles = look_up(_LATER_CHUNK if has_prefix else _FIRST_CHUNK, dtype, padded_head_dim)
    row_bytes = padded_head_dim * dtype.itemsize
    keys, stages = fitting_keys(
        tiles.keys, tiles.num_stages, key_bytes=2 * row_bytes, rows=tiles.rows,
        row_bytes=row_bytes, itemsize=dtype.itemsize, device=device,
    )  # fmt: skip
    return replace(tiles, keys=keys, num_stages=stages)
