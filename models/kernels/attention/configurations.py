"""Tile sizes of the attention kernels, in tables: nothing is tuned while serving."""

from dataclasses import dataclass, replace
from math import inf

import torch

from models.forward_context import AttentionWorkspace

MAX_SPLITS = 32
"""Most parts of one sequence's keys, but for Tiles.most_splits; a power of two."""

MAX_PARTIALS = 2048
"""Most partial results of one launch, the size of the workspace.

Only steps with prompt chunks make that many: they split two sequences of 32k tokens even if most of
their requests are chunks or, in a captured step, dummy requests.
"""

_PARTIALS = {1: 1024, 2: 512, 4: 512}
"""Partial results of one launch by bytes of a cached element: 512 are four programs for each
multiprocessor of an H200.

In bf16, 1024 took 23.8 us instead of 17.7 for 32 requests of 256 tokens; 256 took 46.1 instead of
41.9 for 8 of 4096. In 8 bits programs compute more per byte: 1024 took 82.9 us instead of 108 for
32 requests of 4096 tokens (H200, 8 kv heads of dimension 128, 2026-11).
"""

EARLY_REQUESTS = 2
"""Up to this many single-token requests, the next kernel may start when the queries are loaded,
before the keys are."""

LEAST_DEALT_REQUESTS = 5
_LEAST_DEALT_PAIRS = 17
"""Requests, and requests times kv heads, from which on parts are dealt.

With fewer, equal lengths lost more: 3 requests of 300 tokens took 7.9 us instead of 6.5 (8 kv heads
of 128), 8 of 1000 9.1 instead of 7.6 (one kv head; H100, 2026-11).
"""

_MOST_DEALT = 512
"""Most programs of a kv head that parts are dealt to: one program adds up all of a sequence."""

_HEADS_OF_WHOLE = 16
"""Most query heads with which up to EARLY_REQUESTS requests take _WHOLE.

The next product's early reads delay the reads of keys, more so the larger it is. With 16 heads one
request took 0.54 ms a step up to 256 tokens (Qwen3-0.6B, H200, 2026-11).
"""

MAX_LATENT_PARTIALS = 64
"""Most partial results of one launch of latent attention, each of all heads of a request.

With 16 heads per program, 128 heads of one request are 512 programs.
"""

MANY_LATENT_TOKENS = 256
"""From this many tokens on there are enough programs that each takes more heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Shape of one program: query rows and keys of a tile, warps, pipeline stages.

    registers: most of a thread; None leaves the number to the compiler.
    is_exact: a row's bits do not depend on the tiles: online_softmax.weigh_keys.
    keys_as_rows: of products, as in keys_of_8_bits; else queries are. For few_queries, which also
        uses num_programs and least_part.

    Decode attention of single-token steps also uses:
        held_keys: first keys of a part, read into registers before the step's own queries are
            ready; 0 holds none.
        num_programs: programs that share the keys of all requests in equal parts, unless parts get
            short; 0 gives each sequence as many parts as it may have. Not of dealt parts.
        num_dealt: programs that take second and later parts, dealt out by the lengths of all
            sequences; 0 deals none.
        even_parts: a dealt sequence's last part is as long as its others, for tiles whose parts
            mostly run at once; else short ones make room for others.
        least_part: fewest keys of a part that is not the last one.
        most_splits: most parts of one sequence, unless parts are dealt.
        most_partials: most partial results of one launch, unless parts are dealt; 0: as _PARTIALS
            says.
        starts_next_late: the next kernel starts after all keys are read, not after the queries are.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    is_exact: bool = False
    held_keys: int = 0
    num_programs: int = 0
    num_dealt: int = 0
    even_parts: bool = False
    least_part: int = 0
    most_splits: int = MAX_SPLITS
    most_partials: int = 0
    starts_next_late: bool = True
    keys_as_rows: bool = False


_DECODE = {
    (2, 64): Tiles(rows=16, keys=64, num_warps=4, num_stages=3),
    (2, 128): Tiles(rows=16, keys=64, num_warps=4, num_stages=3),
    (2, 256): Tiles(rows=16, keys=32, num_warps=4, num_stages=3),
    (2, 512): Tiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 64): Tiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 128): Tiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 256): Tiles(rows=16, keys=16, num_warps=4, num_stages=2),
    (4, 512): Tiles(rows=16, keys=16, num_warps=4, num_stages=1),
}
"""Tiles by bytes of an element and padded head dimension, from 64.

Rows of heads of 512 are not measured: they are the largest tiles that fit shared memory.
"""

_BESIDE_CHUNKS = {
    heads: replace(tiles, num_dealt=256, least_part=256) for heads, tiles in _DECODE.items()
}
"""The same for the single tokens of steps with chunks, and of steps without new keys.

A recorded step has tables for absent requests, so equal numbers of parts would be few.
"""

_BROAD = replace(_DECODE[2, 256], num_dealt=512)
"""For single-token steps of more than _BROAD_PAIRS requests times kv heads, in heads of 256.

Of fewer, equal lengths lost up to 20 % by dealing: 24 requests of 300 tokens took 33.8 us instead
of 28.9 (H100, 16 heads, 8 kv heads, 2026-11).
"""
_BROAD_PAIRS = 256

_BROAD_8 = replace(_DECODE[2, 256], registers=168, num_dealt=384, least_part=128)
"""The same with FP8 keys, for all steps whose parts are dealt.

With more registers two programs share a multiprocessor, not three.
"""

_WHOLE = Tiles(
    rows=16, keys=128, num_warps=8, num_stages=5, held_keys=256, num_programs=128, least_part=256
)
_HELD = Tiles(
    rows=16, keys=64, num_warps=4, num_stages=3, held_keys=128, num_dealt=352, least_part=128,
    most_splits=48, most_partials=384,
)  # fmt: skip
_EVEN = Tiles(
    rows=16, keys=64, num_warps=4, num_stages=3, num_dealt=368, least_part=256, even_parts=True,
    starts_next_late=False,
)  # fmt: skip
_HALF = Tiles(
    rows=16, keys=64, num_warps=8, num_stages=5, held_keys=64, num_programs=256, num_dealt=256,
    least_part=256, starts_next_late=False,
)  # fmt: skip
_WIDE = Tiles(rows=16, keys=64, num_warps=4, num_stages=3, num_dealt=384, least_part=1024)
_SHALLOW = Tiles(rows=16, keys=16, num_warps=1, num_stages=3, num_dealt=512, least_part=1024)

_HELD_WINDOW = replace(_HELD, num_dealt=0, most_partials=1)
"""For windows of at most its held keys, of up to _WINDOW_PAIRS: nothing is added up."""
_WINDOW_PAIRS = 256

_SINGLE_TOKENS = (
    (64, _HELD), (216, _EVEN), (256, _HALF), (512, _WIDE), (inf, _SHALLOW)
)  # fmt: skip
"""Tiles of single-token steps with 2-byte elements and heads of up to 128, by the largest number of
requests times kv heads.

Few programs hold the first keys of their part: these arrive while queries are computed. Then four
programs share a multiprocessor, or two that each have an equal part. Beyond that, single warps lose
least between tiles, and small tiles let most programs run at once.

With _EVEN, 12 requests of 303 and 1000 tokens took 12.7 and 20.9 us, 9 of 4096 44.8, 16 of 303 and
4096 13.8 and 72.2, 24 of 303 and 1000 15.4 and 34.6, 32 of 303 and 1000 17.8 and 39.5; with _HALF
the last four took 20.5, 40.3, 18.3 and 38.5, and with _WHOLE, whose programs have a multiprocessor
each, the first five 18.4, 30.6, 70.8, 15.1 and 72.6 (H200, 32 heads, 8 kv heads of 128, 2026-11).
In whole steps of Qwen3-8B after 128 to 384 tokens _EVEN lost 0.5 % with 12 requests, 1 % with 16
and 1.2 % with 32, and won 0.9 % with 24: keys that are held are there when their queries are.
"""

_FLAT = (
    (8, Tiles(rows=8, keys=64, num_warps=1, num_stages=2)),
    (16, Tiles(rows=16, keys=32, num_warps=1, num_stages=5)),
    (inf, Tiles(rows=32, keys=32, num_warps=4, num_stages=3)),
)
"""For FP8 keys and 2-byte queries in heads of up to 128, by the largest group of query heads.

Keys are the rows of both products: see keys_of_8_bits. Larger groups take more registers.
"""

_FLAT_DEALT = tuple(
    (most, replace(tiles, num_dealt=768 if most <= 8 else 512, least_part=128))
    for most, tiles in _FLAT
)
"""The same where parts are dealt.

With 1024 programs more single warps than run at once, two on each quarter of a multiprocessor, may
get keys: 48 requests of 1000 tokens took 44 us instead of 37, though 16 of 16,384 tokens 141
instead of 148 (H200, 32 heads, 8 kv heads of 128, 2026-11).
"""

_FLAT_HELD = (
    (8, Tiles(rows=8, keys=128, num_warps=4, num_stages=3, held_keys=128, most_partials=256)),
    (
        32,
        Tiles(
            rows=8, keys=64, num_warps=2, num_stages=5, held_keys=64, num_dealt=512,
            most_splits=48, most_partials=512,
        ),
    ),
    (
        64,
        Tiles(
            rows=8, keys=128, num_warps=2, num_stages=2, num_dealt=504, least_part=128,
            most_partials=512,
        ),
    ),
)  # fmt: skip
"""The same for single tokens in groups of up to 8, by requests times kv heads: as _HELD.

Groups of more than 4 do not take the first: with head norms its registers spill. Four programs of
the third share a multiprocessor, and all parts of 5 to 8 equal sequences of 8 heads run at once.

One request of 303, 4096 and 16,384 tokens took 4.6, 8.0 and 19.5 us with the first, 4.5, 11.4 and
20.2 with the second, 7, 11.6 and 21.2 with the third. 8 requests of 303, 1000 and 16,384 tokens
took 8.8, 14.1 and 84.0 us with the second, 9.3, 12.4 and 75.8 with the third (H200, 32 heads, 8 kv
heads of 128, 2026-11).
"""

_FLAT_PAIRS = 32
_FLAT_FEW = Tiles(rows=16, keys=64, num_warps=2, num_stages=3, num_dealt=256)
"""The same in groups of 9 to 16, for up to _FLAT_PAIRS requests times kv heads."""


def first_requests_of_each_form(num_kv_heads: int) -> list[int]:
    """Returns the smallest counts of single-token requests that take other kernels, rising.

    Warm-up runs these: each set of tiles is a kernel to build, as are splitting or not, which ends
    with a set of tiles, and when the next kernel starts.
    """
    tables = (_SINGLE_TOKENS, _FLAT_HELD, ((_FLAT_PAIRS, _FLAT_FEW), (_WINDOW_PAIRS, _HELD_WINDOW)))
    last_pairs = [int(most) for table in tables for most, _ in table if most != inf]
    last_pairs += [_LEAST_DEALT_PAIRS - 1, _BROAD_PAIRS]
    first = {1, EARLY_REQUESTS + 1, LEAST_DEALT_REQUESTS}
    return sorted(first.union(most // num_kv_heads + 1 for most in last_pairs))


def decode_tiles(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    padded_head_dim: int,
    *,
    num_requests: int | None,
    num_heads: int,
    num_kv_heads: int,
    window: int = 0,
) -> Tiles:
    """Returns the tiles of decode attention.

    padded_head_dim is a power of two; num_requests is that of a single-token step, None in others;
    window is the most keys that a query sees, 0 for all.

    Raises:
        ValueError: no kernel takes such heads.
    """
    num_pairs = inf if num_requests is None else num_requests * num_kv_heads
    is_dealt = _is_dealt(num_requests, num_kv_heads)
    is_narrow = dtype.itemsize == 2 and padded_head_dim <= 128
    if is_narrow and cache_dtype.itemsize == 1:
        return _flat_tiles(num_pairs, num_heads // num_kv_heads, is_dealt)
    is_broad = dtype.itemsize == 2 and padded_head_dim == 256
    if is_broad and is_dealt and cache_dtype.itemsize == 1:
        return _BROAD_8
    if num_requests is None:
        return look_up(_BESIDE_CHUNKS, dtype, padded_head_dim)
    if is_broad and is_dealt and num_pairs > _BROAD_PAIRS:
        return _BROAD
    if not is_narrow:
        return look_up(_DECODE, dtype, padded_head_dim)
    if 0 < window <= _HELD_WINDOW.held_keys and num_pairs <= _WINDOW_PAIRS:
        return _HELD_WINDOW
    if num_requests <= EARLY_REQUESTS:
        return _WHOLE if num_heads <= _HEADS_OF_WHOLE else _HELD
    return next(tiles for most, tiles in _SINGLE_TOKENS if num_pairs <= most)


def _is_dealt(num_requests: int | None, num_kv_heads: int) -> bool:
    if num_requests is None:
        return True
    num_pairs = num_requests * num_kv_heads
    return num_requests >= LEAST_DEALT_REQUESTS and num_pairs >= _LEAST_DEALT_PAIRS


def _flat_tiles(num_pairs: float, group: int, is_dealt: bool) -> Tiles:
    if group <= 8:
        for most, tiles in _FLAT_HELD if group <= 4 else _FLAT_HELD[1:]:
            if num_pairs <= most:
                return tiles
    elif group <= 16 and num_pairs <= _FLAT_PAIRS:
        return _FLAT_FEW
    return next(tiles for most, tiles in (_FLAT_DEALT if is_dealt else _FLAT) if group <= most)


def num_splits(
    workspace: AttentionWorkspace | None,
    num_requests: int,
    num_heads: int,
    num_kv_heads: int,
    cache_dtype: torch.dtype,
    tiles: Tiles,
    *,
    beside_chunks: bool = False,
) -> int:
    """Returns the most parts that each sequence's keys are split into.

    The number is the same in every replay of a graph.
    """
    if workspace is None:
        return 1
    pairs = num_requests * num_kv_heads
    room = workspace.lse.numel() // (num_requests * num_heads)
    most = MAX_PARTIALS if beside_chunks else tiles.most_partials or _PARTIALS[cache_dtype.itemsize]
    return max(1, min(tiles.most_splits, most // pairs, room))


def num_dealt(
    workspace: AttentionWorkspace | None,
    num_requests: int | None,
    num_kv_heads: int,
    tiles: Tiles,
    *,
    window: int,
) -> int:
    """Returns how many programs of each kv head share the second and later parts of all sequences.

    num_requests: as of decode_tiles. 0: each sequence has num_splits parts.
    """
    is_dealt = workspace is not None and _is_dealt(num_requests, num_kv_heads)
    if not is_dealt or 0 < window <= least_part(tiles):
        return 0
    return min(tiles.num_dealt // num_kv_heads, _MOST_DEALT)


def least_part(tiles: Tiles) -> int:
    """Returns the fewest keys of a part that is not the last one."""
    return max(tiles.least_part, tiles.keys)


def look_up(table: dict[tuple[int, int], Tiles], dtype: torch.dtype, head_dim: int) -> Tiles:
    """Returns the tiles of a table by bytes of an element and padded head dimension, from 64.

    Raises:
        ValueError: the table has none.
    """
    tiles = table.get((dtype.itemsize, max(64, head_dim)))
    if tiles is None:
        raise ValueError(
            f"attention has no kernel for heads of {head_dim} {dtype}; it takes up to 512 of "
            "float32, float16 or bfloat16"
        )
    return tiles
