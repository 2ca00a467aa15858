"""Tiles of hopper_attention, in tables."""

import torch

from models.kernels.attention.configurations import Tiles
from models.kernels.gpu import is_hopper

ROWS_OF_TILE = 128
"""Rows of a tile of queries of hopper_attention."""

MAX_TILE_PARTS = 132
"""Most parts of tiles that programs of hopper_attention share, the size of the workspace: one for
each multiprocessor of an H200."""

_HOPPER = {
    64: Tiles(rows=128, keys=128, num_warps=4, num_stages=4),
    128: Tiles(rows=128, keys=128, num_warps=4, num_stages=2),
    256: Tiles(rows=128, keys=64, num_warps=4, num_stages=2),
}
"""Tiles by head dimension; stages fill the shared memory.

16 heads and 2 kv heads of 256: a prompt of 2048 tokens, one of 8192 and 2048 tokens after 6144 took
75.6, 800 and 352 us, with the portable kernel 101, 1043 and 739 (H200, 2026-11).
"""

_HOPPER_PARTS = {
    (torch.bfloat16, 64): Tiles(rows=128, keys=128, num_warps=4, num_stages=4, is_exact=True),
    (torch.bfloat16, 128): Tiles(rows=128, keys=128, num_warps=4, num_stages=2, is_exact=True),
    (torch.float16, 64): Tiles(rows=128, keys=64, num_warps=4, num_stages=8, is_exact=True),
    (torch.float16, 128): Tiles(rows=128, keys=64, num_warps=4, num_stages=4, is_exact=True),
}
"""The same in batch-invariant mode, by dtype and head dimension.

Small weights lose bits in float16, so there each row must meet its highest scores as late as in
_INVARIANT: the keys of its tiles. A prompt of 2048 tokens, one of 8192 and 2048 tokens after 6144
took 77.4, 900 and 455 us, in tiles of 64 keys 76.9, 980 and 496, and with _HOPPER 66.8, 803 and 396
(H100, 32 heads, 8 kv heads of 128, 2026-11). 16 prompts of 512 tokens took 202 us, in tiles of 64
keys 187: too little for one more kernel (H200).
"""

_LEAST_HOPPER_BLOCK = 8
"""Smallest block, in tokens, that fills whole rows of the copy engine's swizzle pattern."""

_MOST_HOPPER_GROUP = 64
"""Most query heads per kv head, by the rows of one warpgroup."""


def hopper_tiles(
    q: torch.Tensor,
    cache_dtype: torch.dtype,
    block_size: int,
    num_kv_heads: int,
    *,
    has_parts: bool = False,
) -> Tiles | None:
    """Returns the tiles of hopper_attention; None if the kernel does not take such queries.

    The kernel takes blocks of powers of two. has_parts: parts of the keys have a softmax each.
    """
    tiles = _HOPPER_PARTS.get((q.dtype, q.shape[2])) if has_parts else _HOPPER.get(q.shape[2])
    if (
        tiles is None
        or q.dtype not in (torch.float16, torch.bfloat16)
        or cache_dtype is not q.dtype
        or q.shape[1] // num_kv_heads > _MOST_HOPPER_GROUP
        or block_size < _LEAST_HOPPER_BLOCK
        or block_size.bit_count() > 1
        or not is_hopper(q.device)
    ):
        return None
    return tiles
