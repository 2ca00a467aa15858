"""Chooses the kernel and tiles of products with weights of 4 and 8 bits, from Hopper's tables."""

from dataclasses import replace
from functools import lru_cache

import torch

from models.kernels.gpu import gpu_of
from models.kernels.products.linear_configurations import MOST_TOKENS, invariant_splits
from models.kernels.tuning import hopper
from models.kernels.tuning.hopper import PACKED_MOST_SPLITS, PackedCosts
from models.kernels.tuning.tiles import GROUP_ROWS, MatrixTiles, PackedTiles

PACKED_COLUMNS = 128
"""Inputs of a tile of packed_wide_linear."""
BUILT_TOKENS = (128, 192, 256, 384, 512, 520, 768, 1024, 2048)
"""Tokens of steps whose kernels are built before serving; tiles that none of them has are not used.
"""
MOST_PACKED_TOKENS = 640
"""In batch-invariant mode, with more, unpacking a weight first is faster."""
_COLUMNS = hopper.PACKED_PAIR.columns
"""Inputs of a tile of matrix_linear, but for some gated ones."""
_PAIR_START_US = 1.5
"""Of a wave of PACKED_PAIR: they add up their sums in the end, and begin with short rings."""
_PART_BYTES_PER_US = 2.5e6
"""Of parts that a product leaves and a norm reads."""
_FEW_TOKENS = 16
"""Up to 16 tokens, three warp groups share out a tile's inputs, which may be split besides."""
_LONG_INPUTS = 16384
_LEAST_BUSY, _MOST_BUSY = 0.5, 0.7
"""Tiles of rows for each multiprocessor that leave three to five of ten idle; twice are too many.

With inputs of this length they are split finer, and programs share multiprocessors. 25600 inputs
and 5120 outputs, of int4 in groups of 128 with the norm (H100, 2026-11-26): 8 and 16 tokens took
35.2 and 34.5 us in six splits of one warp group, 39.0 and 39.0 without. 8192 inputs took 14.7 and
14.7 in splits, 13.8 and 14.5 without.
"""
_SHORT_SECOND_WAVE = 1.5
"""Tiles of rows for each multiprocessor below which most have none in the second of two waves.

Of one warp group two run at once. 10240 rows of int4 in groups of 128 took 18.4 us with 24 tokens
and 5120 inputs, 27.3 with 8192, in three groups 22.4 and 31.6 (H100, 2026-11-26).
"""
_SHARED_BYTES = 227 * 1024
"""Shared memory of a multiprocessor."""
_MOST_PROGRAMS = 4
"""Gated tiles that have registers on a multiprocessor."""


@lru_cache(maxsize=1024)
def packed_tiles(
    num_tokens: int,
    num_rows: int,
    num_inputs: int,
    *,
    group: int,
    is_gated: bool,
    dtype: torch.dtype,
    device: torch.device,
    num_bits: int = 4,
    may_split: bool = False,
) -> MatrixTiles | PackedTiles | None:
    """Returns the tiles of a product with a packed weight of `num_rows` rows.

    None where it is unpacked first.

    group: columns that share a scale.
    num_bits: 4 or 8, of each number.
    may_split: the tiles may have splits.
    """
    if not _takes(group, num_inputs, dtype, device):
        return None
    count = gpu_of(device).multiprocessors
    if is_gated:
        return _gated_tiles(num_tokens, num_rows, num_inputs, num_bits, count)
    if num_tokens > MOST_TOKENS:
        costs = (hopper.PACKED_SPLIT if may_split else hopper.PACKED)[num_bits]
        return _fastest_built(costs, num_tokens, num_rows, num_inputs, count)
    tokens = _padded(num_tokens)
    split = _split_tiles(tokens, num_rows, num_inputs, num_bits, count)
    if may_split and split.splits > 1:
        return split
    return _whole_tiles(tokens, num_rows, num_bits, count)


@lru_cache(maxsize=1024)
def invariant_packed_tiles(
    num_tokens: int,
    num_rows: int,
    num_inputs: int,
    *,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> MatrixTiles | None:
    """Returns the tiles of batch-invariant mode for a packed weight of `num_rows` rows.

    None, for any number of tokens, where it is unpacked first. One warp group adds up all tiles of
    a program: several would add in another order.
    """
    if not _takes(group, num_inputs, dtype, device):
        return None
    tiles = hopper.PACKED_ALONE[_padded(num_tokens)]
    return replace(tiles, splits=invariant_splits(num_rows, num_inputs))


def num_tiles(tiles: MatrixTiles | PackedTiles, num_tokens: int, num_rows: int) -> int:
    """Returns the number of tiles of a weight of `num_rows` rows."""
    return -(-num_rows // tiles.rows) * -(-num_tokens // tiles.tokens)


def _takes(group: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether there are kernels for such weights; groups may not straddle tiles."""
    if dtype is not torch.bfloat16 or not gpu_of(device).is_hopper:
        return False
    return not _COLUMNS % group or not group % _COLUMNS or group == num_inputs


def _padded(num_tokens: int) -> int:
    """Returns the tokens of a tile of matrix_linear: 8, 16, 32 or 64."""
    return min(MOST_TOKENS, max(8, 1 << (num_tokens - 1).bit_length()))


def _whole_tiles(tokens: int, num_rows: int, num_bits: int, multiprocessors: int) -> MatrixTiles:
    """Returns the tiles of up to 64 tokens: warp groups that share out their inputs."""
    num_waves = -(-num_rows // GROUP_ROWS) / multiprocessors
    if _FEW_TOKENS < tokens < MOST_TOKENS and 1 < num_waves < _SHORT_SECOND_WAVE:
        return replace(hopper.PACKED_ALONE[tokens], num_stages=_most_stages(tokens, num_bits, 2))
    if tokens < MOST_TOKENS:
        return MatrixTiles(tokens=tokens, rows=GROUP_ROWS, columns=_COLUMNS, num_stages=2, groups=3)
    return (
        hopper.PACKED_PAIR
        if num_rows <= GROUP_ROWS * multiprocessors
        else hopper.PACKED_ALONE[tokens]
    )


def _split_tiles(
    tokens: int, num_rows: int, num_inputs: int, num_bits: int, multiprocessors: int
) -> MatrixTiles:
    """Returns the tiles of up to 64 tokens with as many splits as run at once, one at least.

    Three warp groups fill a multiprocessor, of one group two programs do, or four of few tokens.
    """
    row_tiles = -(-num_rows // GROUP_ROWS)
    tiles = _whole_tiles(tokens, num_rows, num_bits, multiprocessors)
    if tokens > _FEW_TOKENS:
        at_once, most = 2, PACKED_MOST_SPLITS
    elif num_inputs >= _LONG_INPUTS and _LEAST_BUSY < row_tiles / multiprocessors <= _MOST_BUSY:
        at_once, most = 4, 6
    else:
        splits = min(PACKED_MOST_SPLITS, multiprocessors // row_tiles)
        return replace(tiles, splits=max(1, splits))
    splits = max(1, min(most, at_once * multiprocessors // row_tiles))
    stages = _most_stages(tokens, num_bits, at_once)
    return replace(tiles, groups=1, num_stages=stages, splits=splits)


def _most_stages(tokens: int, num_bits: int, at_once: int) -> int:
    """Returns the stages of programs of which `at_once` share a multiprocessor."""
    return min(4, _SHARED_BYTES // at_once // _stage_bytes(tokens, num_bits))


def _gated_tiles(
    num_tokens: int, num_rows: int, num_inputs: int, num_bits: int, multiprocessors: int
) -> MatrixTiles | PackedTiles:
    if num_tokens > MOST_TOKENS:
        costs = hopper.PACKED_GATED[num_bits]
        return _fastest_built(costs, num_tokens, num_rows, num_inputs, multiprocessors)
    tokens = _padded(num_tokens)
    if tokens == MOST_TOKENS:
        tiles = hopper.PACKED_GATED_FEW[num_bits]
        is_full = num_tiles(tiles, num_tokens, num_rows) >= multiprocessors
        return tiles if is_full else hopper.PACKED_ALONE[tokens]
    return _gated_few_tiles(tokens, num_rows, num_bits, multiprocessors)


def _gated_few_tiles(
    tokens: int, num_rows: int, num_bits: int, multiprocessors: int
) -> MatrixTiles:
    """Returns the tiles with the longest rings of which all run at once.

    28672 rows and 4096 inputs of 8 bits take 51.5 us with 32 tokens in rings of three tiles with
    128 inputs, 58.5 in rings of two with 256, of which three run at once (H100, 2026-11-26).
    """
    per_multiprocessor = -(-num_rows // (GROUP_ROWS * multiprocessors))
    for columns, stages in ((_COLUMNS, 4), (_COLUMNS, 3), (_COLUMNS, 2), (_COLUMNS // 2, 3)):
        ring_bytes = stages * _stage_bytes(tokens, num_bits, columns)
        if per_multiprocessor <= min(_MOST_PROGRAMS, _SHARED_BYTES // ring_bytes):
            return replace(hopper.PACKED_ALONE[tokens], columns=columns, num_stages=stages)
    # Tiles that come after others: few tokens leave memory for long rings.
    return replace(hopper.PACKED_ALONE[tokens], num_stages=4 if tokens == 8 else 2)


def _stage_bytes(tokens: int, num_bits: int, columns: int = _COLUMNS) -> int:
    """Returns the shared memory of a tile's weights and inputs."""
    return columns * (GROUP_ROWS * num_bits // 8 + 2 * tokens)


def _fastest_built(
    costs: PackedCosts, num_tokens: int, num_rows: int, num_inputs: int, multiprocessors: int
) -> MatrixTiles | PackedTiles:
    """Returns the fastest of the tiles of those BUILT_TOKENS that have no more tiles of tokens."""
    built = {
        _fastest(costs, each, num_rows, num_inputs, multiprocessors)
        for each in BUILT_TOKENS
        if _num_token_tiles(each) <= _num_token_tiles(num_tokens)
    }
    costs = {tiles: cost for tiles, cost in costs.items() if tiles in built}
    return _fastest(costs, num_tokens, num_rows, num_inputs, multiprocessors)


def _num_token_tiles(num_tokens: int) -> int:
    return -(-num_tokens // 128)


def _fastest(
    costs: PackedCosts, num_tokens: int, num_rows: int, num_inputs: int, multiprocessors: int
) -> MatrixTiles | PackedTiles:
    def microseconds(tiles: MatrixTiles | PackedTiles) -> float:
        splits = tiles.splits if isinstance(tiles, MatrixTiles) else 1
        is_small = isinstance(tiles, MatrixTiles) and tiles.groups == 1
        at_once = multiprocessors * (2 if is_small else 1)
        waves = -(-num_tiles(tiles, num_tokens, num_rows) * splits // at_once)
        product = costs[tiles] * waves * num_inputs / (128 * splits)
        if tiles == hopper.PACKED_PAIR:
            product += waves * _PAIR_START_US
        part_bytes = 0 if splits == 1 else 8 * splits * num_tokens * num_rows
        return product + part_bytes / _PART_BYTES_PER_US

    return min(costs, key=microseconds)
