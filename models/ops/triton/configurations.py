"""Tile sizes of the attention kernels: a table, so that nothing is tuned while serving."""

from dataclasses import dataclass

import torch

from models.forward_context import AttentionWorkspace

MAX_SPLITS = 32
"""Most parts that one sequence's keys are split into; a power of two."""

MAX_PARTIALS = 512
"""Most partial results of one launch, four programs for each multiprocessor of an H200.

With 1024, 32 requests of 256 tokens took 20.6 us instead of 16.7; with 256, 32 of 4096 took 152
instead of 130 (H200, bf16, 8 kv heads of dimension 128, 2026-11).
"""

EARLY_REQUESTS = 2
"""Up to this many single-token requests, attention lets the next kernel start at once.

With more, the next kernel's programs take room that attention still needs: 8 requests 5.20 ms a
step instead of 4.88; 1 request 3.89 instead of 3.91 (H200, Qwen3-8B, 2026-11).
"""

MAX_LATENT_PARTIALS = 64
"""Most partial results of one launch of latent attention, each of all heads of a request.

With 16 heads to a program, 128 heads of one request are 512 programs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Shape of one program: query rows and keys of a tile, warps, and depth of the pipeline."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


_DECODE = {
    (2, 64): Tiles(rows=16, keys=64, num_warps=4, num_stages=3),
    (2, 128): Tiles(rows=16, keys=64, num_warps=4, num_stages=3),
    (2, 256): Tiles(rows=16, keys=32, num_warps=4, num_stages=3),
    (4, 64): Tiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 128): Tiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 256): Tiles(rows=16, keys=16, num_warps=4, num_stages=2),
}
"""By bytes of an element and padded head dimension, from 64."""

_FIRST_CHUNK = {
    (2, 64): Tiles(rows=128, keys=64, num_warps=8, num_stages=3),
    (2, 128): Tiles(rows=128, keys=128, num_warps=8, num_stages=3),
    (2, 256): Tiles(rows=64, keys=64, num_warps=4, num_stages=3),
    (4, 64): Tiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 128): Tiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 256): Tiles(rows=16, keys=16, num_warps=4, num_stages=1),
}
"""With what was projected in this step, of a chunk that begins its sequence.

Smaller tiles are better where chunks are short (64 rows, 32 keys: 16 of 512 tokens in 137 us
instead of 184), but lose more where attention matters (8192 tokens in 1128 instead of 1031, H200,
32 heads, 8 kv heads of 128, 2026-11).
"""

_LATER_CHUNK = {
    (2, 64): Tiles(rows=128, keys=64, num_warps=4, num_stages=3),
    (2, 128): Tiles(rows=128, keys=64, num_warps=4, num_stages=3),
    (2, 256): Tiles(rows=64, keys=32, num_warps=4, num_stages=2),
    (4, 64): Tiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 128): Tiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 256): Tiles(rows=16, keys=16, num_warps=4, num_stages=1),
}


def decode_tiles(dtype: torch.dtype, padded_head_dim: int) -> Tiles:
    """Returns the tiles of decode attention.

    Raises:
        ValueError: the kernels do not take such heads.
    """
    return _look_up(_DECODE, dtype, padded_head_dim)


def prefill_tiles(dtype: torch.dtype, padded_head_dim: int, *, has_prefix: bool) -> Tiles:
    """Returns the tiles of prefill attention, for chunks with cached tokens before them or without.

    Raises:
        ValueError: the kernels do not take such heads.
    """
    return _look_up(_LATER_CHUNK if has_prefix else _FIRST_CHUNK, dtype, padded_head_dim)


def num_splits(
    workspace: AttentionWorkspace | None, num_requests: int, num_heads: int, num_kv_heads: int
) -> int:
    """Returns how many parts each sequence's keys are split into at most.

    It depends on nothing that changes between replays of a graph.
    """
    if workspace is None:
        return 1
    pairs = num_requests * num_kv_heads
    room = workspace.lse.numel() // (num_requests * num_heads)
    return max(1, min(MAX_SPLITS, MAX_PARTIALS // pairs, room))


def _look_up(table: dict[tuple[int, int], Tiles], dtype: torch.dtype, head_dim: int) -> Tiles:
    """Returns a table's entry; small head dimensions share one."""
    tiles = table.get((dtype.itemsize, max(64, head_dim)))
    if tiles is None:
        raise ValueError(
            f"attention has no kernel for heads of {head_dim} {dtype}; it takes up to 256 of "
            "float32, float16 or bfloat16"
        )
    return tiles
