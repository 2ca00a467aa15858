"""Chooses the tiles of the attention kernels, from the GPU's tables."""

from dataclasses import replace
from functools import lru_cache
from math import inf

import torch

from models.forward_context import MAX_PREFIX_TILES, TILE_QUERIES, AttentionWorkspace
from models.kernels.gpu import gpu_of, is_hopper
from models.kernels.tuning import hopper
from models.kernels.tuning.registry import own_tables, tables_on
from models.kernels.tuning.table import ByHead, Tables, look_up, row_of
from models.kernels.tuning.tiles import AttentionTiles

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

MAX_LATENT_PARTIALS = 64
"""Most partial results of one launch of latent attention, each of all heads of a request.

With 16 heads per program, 128 heads of one request are 512 programs.
"""

MANY_LATENT_TOKENS = 256
"""From this many tokens on there are enough programs that each takes more heads."""


PART = 512
"""Keys of a part in batch-invariant mode; a multiple of every tile."""

LANES = 16
"""Sums of a row's exact weights that are kept apart, each of every LANES-th key.

Tensor cores spread a row over four threads, which hold two neighbours of every eight columns, or
over two warps of such threads.
"""

ROWS_OF_TILE = 128
"""Rows of a tile of queries of hopper_attention."""

MAX_TILE_PARTS = 132
"""Most parts of tiles that programs of hopper_attention share, the size of the workspace: one for
each multiprocessor of an H200."""

_NARROW_REQUESTS = 5
_NARROW_ROWS = 32
_NARROW_GROUP = 8
"""Fewest requests, most rows and largest group with which more rows than 16 take narrow tiles.

In such groups the warm-up step of two short prompts builds them."""

_LEAST_HOPPER_BLOCK = 8
"""Smallest block, in tokens, that fills whole rows of the copy engine's swizzle pattern."""

_MOST_HOPPER_GROUP = 64
"""Most query heads per kv head, by the rows of one warpgroup."""

_LEAST_KEYS = 16
"""Fewest keys of a tile: tensor cores multiply no fewer."""


def first_requests_of_each_form(num_kv_heads: int) -> list[int]:
    """Returns the smallest counts of single-token requests that take other kernels, rising.

    Warm-up runs these: each set of tiles is a kernel to build, as are splitting or not, which ends
    with a set of tiles, and when the next kernel starts.
    """
    tables = own_tables()
    limits = [limit for limit, _ in tables.single_tokens + tables.flat_held]
    last_pairs = [int(most) for (most,) in limits if most != inf]
    last_pairs += [tables.most_flat_pairs, tables.most_window_pairs, tables.most_narrow_pairs]
    last_pairs.append(_LEAST_DEALT_PAIRS - 1)
    first = {1, EARLY_REQUESTS + 1, LEAST_DEALT_REQUESTS}
    return sorted(first.union(most // num_kv_heads + 1 for most in last_pairs))


@lru_cache(maxsize=1024)
def decode_tiles(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    padded_head_dim: int,
    *,
    num_requests: int | None,
    num_heads: int,
    num_kv_heads: int,
    window: int = 0,
    device: torch.device,
) -> AttentionTiles:
    """Returns the tiles of decode attention.

    padded_head_dim is a power of two; num_requests is that of a single-token step, None in others;
    window is the most keys that a query sees, 0 for all.

    Raises:
        ValueError: no kernel takes such heads.
    """
    tables = tables_on(device)
    num_pairs = inf if num_requests is None else num_requests * num_kv_heads
    is_dealt = _is_dealt(num_requests, num_kv_heads)
    is_narrow = dtype.itemsize == 2 and padded_head_dim <= 128
    if is_narrow and cache_dtype.itemsize == 1:
        return _flat_tiles(tables, num_pairs, num_heads // num_kv_heads, is_dealt)
    is_broad = dtype.itemsize == 2 and padded_head_dim == 256
    if is_broad and is_dealt and cache_dtype.itemsize == 1:
        return tables.broad_8
    if num_requests is None:
        return by_head(tables.beside_chunks, dtype, padded_head_dim)
    if is_broad and is_dealt and num_pairs > tables.most_narrow_pairs:
        return tables.broad
    if not is_narrow:
        return by_head(tables.decode, dtype, padded_head_dim)
    if 0 < window <= tables.held_window.held_keys and num_pairs <= tables.most_window_pairs:
        return tables.held_window
    if num_requests <= EARLY_REQUESTS:
        return tables.whole if num_heads <= tables.most_whole_heads else tables.held
    return row_of(tables.single_tokens, num_pairs)


def _is_dealt(num_requests: int | None, num_kv_heads: int) -> bool:
    if num_requests is None:
        return True
    num_pairs = num_requests * num_kv_heads
    return num_requests >= LEAST_DEALT_REQUESTS and num_pairs >= _LEAST_DEALT_PAIRS


def _flat_tiles(tables: Tables, num_pairs: float, group: int, is_dealt: bool) -> AttentionTiles:
    if group <= 8:
        held = look_up(tables.flat_held if group <= 4 else tables.flat_held[1:], num_pairs)
        if held is not None:
            return held
    elif group <= 16 and num_pairs <= tables.most_flat_pairs:
        return tables.flat_few
    return row_of(tables.flat_dealt if is_dealt else tables.flat, group)


def num_splits(
    workspace: AttentionWorkspace | None,
    num_requests: int,
    num_heads: int,
    num_kv_heads: int,
    cache_dtype: torch.dtype,
    tiles: AttentionTiles,
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
    tiles: AttentionTiles,
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


def least_part(tiles: AttentionTiles) -> int:
    """Returns the fewest keys of a part that is not the last one."""
    return max(tiles.least_part, tiles.keys)


def by_head(table: ByHead, dtype: torch.dtype, head_dim: int) -> AttentionTiles:
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


@lru_cache(maxsize=1024)
def few_query_tiles(
    num_rows: int, group: int, num_requests: int, device: torch.device
) -> AttentionTiles:
    """Returns the tiles of few_queries; num_rows: most of a request and kv head."""
    tables = tables_on(device)
    has_two = num_requests >= _NARROW_REQUESTS and group <= _NARROW_GROUP
    is_narrow = num_rows <= (_NARROW_ROWS if has_two else tables.narrow_queries.rows)
    return tables.narrow_queries if is_narrow else tables.wide_queries


def most_few_rows(device: torch.device) -> int:
    """Returns how many rows of results of few_queries the workspace has room for.

    Each program has a part of two shared tiles at most.
    """
    tables = tables_on(device)
    both = tables.narrow_queries, tables.wide_queries
    return max(2 * tiles.num_programs * tiles.rows for tiles in both)


@lru_cache
def prefix_tiles(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, device: torch.device
) -> AttentionTiles:
    """Returns the tiles of prefix_attention.

    Raises:
        ValueError: no kernel takes such heads.
    """
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    is_narrow = dtype.itemsize == 2 and cache_dtype.itemsize == 1
    tiles = by_head(tables_on(device).prefixes, cache_dtype if is_narrow else dtype, block_d)
    row_bytes = block_d * dtype.itemsize
    keys, stages = fitting_keys(
        tiles.keys, tiles.num_stages, key_bytes=2 * row_bytes, rows=tiles.rows,
        row_bytes=row_bytes, itemsize=dtype.itemsize, device=device,
    )  # fmt: skip
    return replace(tiles, keys=keys, num_stages=stages)


def least_shared_bytes(cache_dtype: torch.dtype, device: torch.device) -> int:
    """Returns the keys and values of a layer that a common prefix must save, to be read once."""
    return tables_on(device).least_shared_bytes[cache_dtype.itemsize]


def most_prefix_parts(num_programs: int) -> int:
    """Returns the most parts of all tiles of a plan, for a kv head that has `num_programs`."""
    return max(num_programs, 2 * MAX_PREFIX_TILES)


def most_prefix_rows(num_heads: int, num_kv_heads: int, device: torch.device) -> int:
    """Returns how many rows of results of shared prefixes the workspace has room for."""
    most = max(tiles.num_programs for tiles in tables_on(device).prefixes.values())
    return most_prefix_parts(most // num_kv_heads) * TILE_QUERIES * num_heads


@lru_cache
def prefill_tiles(
    dtype: torch.dtype, padded_head_dim: int, *, has_prefix: bool, device: torch.device
) -> AttentionTiles:
    """Returns the tiles of prefill attention, for chunks after cached tokens or without.

    Raises:
        ValueError: no kernel takes such heads.
    """
    tables = tables_on(device)
    table = tables.later_chunk if has_prefix else tables.first_chunk
    tiles = by_head(table, dtype, padded_head_dim)
    row_bytes = padded_head_dim * dtype.itemsize
    keys, stages = fitting_keys(
        tiles.keys, tiles.num_stages, key_bytes=2 * row_bytes, rows=tiles.rows,
        row_bytes=row_bytes, itemsize=dtype.itemsize, device=device,
    )  # fmt: skip
    return replace(tiles, keys=keys, num_stages=stages)


def fitting_keys(
    keys: int,
    num_stages: int,
    *,
    key_bytes: int,
    rows: int,
    row_bytes: int,
    itemsize: int,
    device: torch.device,
) -> tuple[int, int]:
    """Returns the keys of a tile and the pipeline's stages, as many of a table's as fit.

    Hopper has what its tables say. Elsewhere keys are halved as long as no two stages of them fit
    beside the rows' weights, and beside the rows where tensor cores read these from shared memory.

    keys, num_stages: of the table.
    key_bytes: of all that a key has in a stage.
    rows: of queries.
    row_bytes: of a query.
    itemsize: bytes of a weight.
    """
    gpu = gpu_of(device)
    query_bytes = rows * row_bytes if gpu.reads_left_factors else 0
    least = min(2, num_stages)
    while True:
        others = query_bytes + rows * keys * itemsize
        stages = gpu.stages(num_stages, keys * key_bytes, others)
        if stages >= least or keys <= _LEAST_KEYS:
            return keys, stages
        keys //= 2


def hopper_tiles(
    q: torch.Tensor,
    cache_dtype: torch.dtype,
    block_size: int,
    num_kv_heads: int,
    *,
    has_parts: bool = False,
) -> AttentionTiles | None:
    """Returns the tiles of hopper_attention; None if the kernel does not take such queries.

    The kernel takes blocks of powers of two. has_parts: parts of the keys have a softmax each.
    """
    of_parts, whole = hopper.HOPPER_PARTS, hopper.HOPPER_CHUNK
    tiles = of_parts.get((q.dtype, q.shape[2])) if has_parts else whole.get(q.shape[2])
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


@lru_cache(maxsize=1024)
def invariant_tiles(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    padded_head_dim: int,
    *,
    num_pairs: int,
    device: torch.device,
) -> AttentionTiles:
    """Returns the tiles of invariant_parts; num_pairs: requests times kv heads.

    Raises:
        ValueError: no kernel takes such heads.
    """
    tables = tables_on(device)
    is_plain = dtype.itemsize == 2 and cache_dtype is dtype and padded_head_dim <= 128
    if is_plain and dtype is torch.bfloat16 and num_pairs > tables.most_pairs:
        return tables.invariant_most
    if is_plain and num_pairs > tables.many_pairs:
        return tables.invariant_many
    return by_head(tables.invariant, dtype, padded_head_dim)
