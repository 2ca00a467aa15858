"""Tile sizes of the attention kernels: a table, so that nothing is tuned while serving."""

from dataclasses import dataclass
from math import inf

import torch

from models.forward_context import AttentionWorkspace
from models.ops.kernel_choice import HOPPER

MAX_SPLITS = 32
"""Most parts that one sequence's keys are split into; a power of two."""

MAX_PARTIALS = 2048
"""Most partial results of one launch, which the workspace has room for.

So many are made in steps with chunks of prompts, where most requests may be no single token, and in
a captured one nobody's: two sequences of 32k tokens shall be split there too.
"""

_PARTIALS = {1: 1024, 2: 512, 4: 512}
"""How many one launch makes, by bytes of a cached element: 512 are four programs for each
multiprocessor of an H200.

With 1024 in bf16, 32 requests of 256 tokens took 23.8 us instead of 17.7; with 256, 8 of 4096 took
46.1 instead of 41.9. In 8 bits 1024 are better, as programs compute more for each byte: 32 requests
of 4096 tokens 82.9 us instead of 108 (H200, 8 kv heads of dimension 128, 2026-11).
"""

EARLY_REQUESTS = 2
"""Up to this many single-token requests, attention lets the next kernel start when its own queries
are there, not when it has seen its keys."""

_HEADS_OF_WHOLE = 16
"""Query heads with which so few requests take _WHOLE.

What the next product reads ahead delays what is still to be read, the more the larger it is. With
16 heads one request took 0.54 ms a step up to 256 tokens, and 0.64 beyond, where parts are added
up; with _WIDE 0.70. With 32 heads it was 3.80 and 4.19 ms, starting the next kernel late, and 4.10
up to 256 tokens starting it early; with _WIDE 3.86 to 3.91 at 256 tokens, and before keys were read
early 3.83 at 140 to 340 (Qwen3-0.6B and 8B, H200, 2026-11).
"""

MOST_WHOLE = 128
"""Programs of which each has a multiprocessor of an H200 for itself."""

MAX_LATENT_PARTIALS = 64
"""Most partial results of one launch of latent attention, each of all heads of a request.

With 16 heads to a program, 128 heads of one request are 512 programs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Shape of one program: query rows and keys of a tile, warps, and depth of the pipeline.

    Of decode attention in steps of single tokens also:
        held_keys: the first keys of a part, which are read into registers before the step's own
            queries are there; 0: none.
        num_programs: programs that the keys of all requests are dealt out to, in equal parts as
            long as those are not short; 0: each sequence has as many parts as there may be.
        starts_next_late: the next kernel may start when all keys were seen; else when the queries
            are there.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    held_keys: int = 0
    num_programs: int = 0
    starts_next_late: bool = True


_DECODE = {
    (2, 64): Tiles(rows=16, keys=64, num_warps=4, num_stages=3),
    (2, 128): Tiles(rows=16, keys=64, num_warps=4, num_stages=3),
    (2, 256): Tiles(rows=16, keys=32, num_warps=4, num_stages=3),
    (4, 64): Tiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 128): Tiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 256): Tiles(rows=16, keys=16, num_warps=4, num_stages=2),
}
"""By bytes of an element and padded head dimension, from 64."""

_DEEP = Tiles(rows=16, keys=32, num_warps=1, num_stages=5)
_WIDE = Tiles(rows=16, keys=64, num_warps=4, num_stages=3)
_SHALLOW = Tiles(rows=16, keys=16, num_warps=1, num_stages=3)
_WHOLE = Tiles(rows=16, keys=128, num_warps=8, num_stages=5, held_keys=256, num_programs=MOST_WHOLE)
_HALF = Tiles(
    rows=16, keys=64, num_warps=8, num_stages=5, held_keys=64, num_programs=256,
    starts_next_late=False,
)  # fmt: skip

_SINGLE_TOKENS = ((MOST_WHOLE, _WHOLE), (256, _HALF), (512, _WIDE), (inf, _SHALLOW))
"""Tiles of steps of single tokens with elements of 2 bytes and heads of up to 128, up to a number
of requests times kv heads.

Up to one program for each multiprocessor, a program holds the keys of a short sequence: nothing is
added up, and the keys come while the queries are computed. Then two programs share a
multiprocessor, then four. With more, a warp that waits for no other one loses least between tiles,
and small tiles let most programs run at once.
"""

_DECODE_8_BITS = {
    (2, 64): _DEEP,
    (2, 128): _DEEP,
    (2, 256): Tiles(rows=16, keys=32, num_warps=4, num_stages=3),
    **{key: tiles for key, tiles in _DECODE.items() if key[0] == 4},
}
"""With keys and values of 8 bits: 128 requests of 4096 tokens 285 us instead of 465 with _WIDE."""

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

_HOPPER = {
    64: Tiles(rows=128, keys=128, num_warps=4, num_stages=4),
    128: Tiles(rows=128, keys=128, num_warps=4, num_stages=2),
}
"""By head dimension; as many stages as shared memory has room for."""

_LEAST_HOPPER_BLOCK = 8
"""Tokens of the smallest block that fills whole rows of the copy engine's swizzled pattern."""

_MOST_HOPPER_GROUP = 64
"""Query heads to a kv head that one warpgroup has rows for."""


def first_requests_of_each_form(num_kv_heads: int) -> list[int]:
    """Returns the smallest numbers of single-token requests that may take other kernels, rising.

    Each set of tiles is a kernel to build, and so is whether there are parts, which ends with a set
    of tiles, and when the next kernel starts: whoever rehearses steps asks here.
    """
    last_pairs = [int(most) for most, _ in _SINGLE_TOKENS if most != inf]
    return sorted({1, EARLY_REQUESTS + 1, *(most // num_kv_heads + 1 for most in last_pairs)})


def decode_tiles(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    padded_head_dim: int,
    *,
    num_requests: int | None,
    num_heads: int,
    num_kv_heads: int,
) -> Tiles:
    """Returns the tiles of decode attention.

    Args:
        dtype: of queries.
        cache_dtype: of cached keys and values.
        padded_head_dim: a power of two.
        num_requests: of a step of single tokens; None in other steps.
        num_heads: Hq.
        num_kv_heads: Hk.

    Raises:
        ValueError: the kernels do not take such heads.
    """
    if cache_dtype.itemsize == 1:
        return _look_up(_DECODE_8_BITS, dtype, padded_head_dim)
    if num_requests is not None and dtype.itemsize == 2 and padded_head_dim <= 128:
        if num_requests <= EARLY_REQUESTS and num_heads > _HEADS_OF_WHOLE:
            return _WIDE
        num_pairs = num_requests * num_kv_heads
        return next(tiles for most, tiles in _SINGLE_TOKENS if num_pairs <= most)
    return _look_up(_DECODE, dtype, padded_head_dim)


def prefill_tiles(dtype: torch.dtype, padded_head_dim: int, *, has_prefix: bool) -> Tiles:
    """Returns the tiles of prefill attention, for chunks with cached tokens before them or without.

    Raises:
        ValueError: the kernels do not take such heads.
    """
    return _look_up(_LATER_CHUNK if has_prefix else _FIRST_CHUNK, dtype, padded_head_dim)


def hopper_tiles(
    q: torch.Tensor, cache_dtype: torch.dtype, block_size: int, num_kv_heads: int
) -> Tiles | None:
    """Returns the tiles of hopper_attention; None if the kernel does not take such queries.

    Args:
        q: [T, Hq, D].
        cache_dtype: of cached keys and values.
        block_size: tokens of a block; the kernel takes powers of two.
        num_kv_heads: Hk.
    """
    tiles = _HOPPER.get(q.shape[2])
    if (
        tiles is None
        or q.dtype not in (torch.float16, torch.bfloat16)
        or cache_dtype is not q.dtype
        or q.shape[1] // num_kv_heads > _MOST_HOPPER_GROUP
        or block_size < _LEAST_HOPPER_BLOCK
        or block_size.bit_count() > 1
        or torch.cuda.get_device_capability(q.device) != HOPPER
    ):
        return None
    return tiles


def num_splits(
    workspace: AttentionWorkspace | None,
    num_requests: int,
    num_heads: int,
    num_kv_heads: int,
    cache_dtype: torch.dtype,
    *,
    beside_chunks: bool = False,
) -> int:
    """Returns how many parts each sequence's keys are split into at most.

    It depends on nothing that changes between replays of a graph.
    """
    if workspace is None:
        return 1
    pairs = num_requests * num_kv_heads
    room = workspace.lse.numel() // (num_requests * num_heads)
    most = MAX_PARTIALS if beside_chunks else _PARTIALS[cache_dtype.itemsize]
    return max(1, min(MAX_SPLITS, most // pairs, room))


def _look_up(table: dict[tuple[int, int], Tiles], dtype: torch.dtype, head_dim: int) -> Tiles:
    """Returns a table's entry; small head dimensions share one."""
    tiles = table.get((dtype.itemsize, max(64, head_dim)))
    if tiles is None:
        raise ValueError(
            f"attention has no kernel for heads of {head_dim} {dtype}; it takes up to 256 of "
            "float32, float16 or bfloat16"
        )
    return tiles
