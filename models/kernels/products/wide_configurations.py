"""Chooses the products of more than 64 tokens that are ours, from Hopper's tables."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import torch

from models.kernels.gpu import gpu_of
from models.kernels.launching.copy_engine import COPY_ALIGNMENT
from models.kernels.tuning import hopper
from models.kernels.tuning.hopper import MOST_TOKENS, ONE_GROUP, THREE_GROUPS, TWO_GROUPS
from models.kernels.tuning.tiles import GROUP_ROWS, WideTiles

_WASTE = {1152: 1.35, 4096: 1.15}
"""Time over that of gapless tiles above which torch's product is faster, up to as many inputs.

For torch's product the gate is a pass of its own, which weighs more the shorter the inputs are.
6912 outputs of 1152 inputs took 44.8 us with 700 tokens (1.31), torch's 51.7, but 8960 of 1536 53.3
with 440 (1.23), torch's 48.7, and 8192 of 2048 47.5 with 340 (1.17), torch's 43.0 (H100,
2026-11-26). On an H200, 4096 inputs gave 1.15.
"""
_LONG_WASTE = 1.12
"""The same of more inputs: 7168 outputs of 8192 inputs took 241 us with 600 tokens (1.13), torch's
213 (H100, 2026-11-26).
"""
_PART_INPUTS = 512
"""Least inputs of a part."""
_LONG_INPUTS = 4096
"""Of few outputs, for which parts of two groups pay off."""
_TILE_TOKENS = min(tiles.tokens for tiles in hopper.WIDE)
_FEW_TOKENS = 512
"""Most tokens for which narrow tiles are worth their kernels."""
_MOST_SPLIT_TOKENS = 256
"""In batch-invariant mode, most tokens whose parts are summed by programs of their own."""


@lru_cache(maxsize=1024)
def wide_tiles(
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    *,
    is_gated: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> WideTiles | None:
    """Returns the tiles of the product [T, K] x [N, K]^T; None where torch's is faster.

    Sizes are those of the result: a gated product reads 2 * N rows. Unmeasured devices and dtypes,
    and sizes that the copy engine cannot take, use torch's product.
    """
    gpu = gpu_of(device)
    if dtype is not torch.bfloat16 or not gpu.is_hopper:
        return None
    if any(size * dtype.itemsize % COPY_ALIGNMENT for size in (num_outputs, num_inputs)):
        return None
    if is_gated:
        return _gated_tiles(num_tokens, 2 * num_outputs, num_inputs, gpu.multiprocessors)
    return _split_tiles(num_tokens, num_outputs, num_inputs, gpu.multiprocessors)


def _gated_tiles(
    num_tokens: int, num_rows: int, num_inputs: int, multiprocessors: int
) -> WideTiles | None:
    def cost(tiles: WideTiles) -> float:
        return hopper.WIDE[tiles] * -(-tiles.count(num_tokens, num_rows) // multiprocessors)

    best = min(_candidates(num_tokens), key=cost)
    area = num_rows * num_tokens / (THREE_GROUPS.groups * GROUP_ROWS * THREE_GROUPS.tokens)
    waste = next((_WASTE[most] for most in _WASTE if num_inputs <= most), _LONG_WASTE)
    return best if cost(best) <= waste * max(1.0, area / multiprocessors) else None


def _candidates(num_tokens: int) -> Iterable[WideTiles]:
    """Returns the tiles to choose from: few, so that their kernels are built before serving."""
    if num_tokens <= _FEW_TOKENS:
        return hopper.WIDE
    return (THREE_GROUPS if _leaves_half_a_tile(num_tokens) else MOST_TOKENS,)


def _leaves_half_a_tile(num_tokens: int) -> bool:
    """Returns whether the last tile of 256 of few would be mostly empty."""
    return num_tokens < 1024 and 0 < num_tokens % 256 <= 128


def tokens_of_other_gates(
    num_outputs: int,
    num_inputs: int,
    counts: Iterable[int],
    most_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[int]:
    """Returns numbers of tokens whose gated products have the tiles that none of `counts` has.

    Warm-up runs these: small products take large tiles from some thousand tokens on. Tiles are
    the same from one multiple of _TILE_TOKENS to the next, but torch's may be faster with the
    first of these tokens.

    most_tokens: of a step.
    """

    def tiles(num_tokens: int) -> WideTiles | None:
        sizes = (num_tokens, num_outputs, num_inputs)
        return wide_tiles(*sizes, is_gated=True, dtype=dtype, device=device)

    taken = {None, *map(tiles, counts)}
    others = []
    for num_tokens in (*range(_TILE_TOKENS, most_tokens, _TILE_TOKENS), most_tokens):
        each = tiles(num_tokens)
        if each not in taken:
            taken.add(each)
            others.append(num_tokens)
    return others


def _split_tiles(
    num_tokens: int, num_outputs: int, num_inputs: int, multiprocessors: int
) -> WideTiles | None:
    """Returns the tiles of a split product, where the outputs alone make too few tiles.

    Splits that fit twice or three times leave gaps: with 160 tokens and the norm, 1536 outputs of
    8960 inputs took 28.7 us in two of one group, in four of two groups 21.5 (H100, 2026-11-26).
    """
    if num_outputs <= 2048 and num_tokens <= 256:
        fitting = multiprocessors // ONE_GROUP.count(num_tokens, num_outputs)
        is_coarse = fitting < 4 and num_inputs >= _LONG_INPUTS
        tiles = TWO_GROUPS if is_coarse else ONE_GROUP
    elif num_outputs <= 5120 and num_inputs >= 8192 and num_tokens <= 128:
        tiles = replace(TWO_GROUPS, slots=7)
    else:
        return None
    splits = min(
        multiprocessors // tiles.count(num_tokens, num_outputs), num_inputs // _PART_INPUTS
    )
    return replace(tiles, splits=splits) if splits > 1 else None


@lru_cache(maxsize=1024)
def invariant_wide_tiles(
    num_tokens: int, num_rows: int, parts: int, *, device: torch.device
) -> WideTiles:
    """Returns the tiles of batch-invariant mode for a weight of `num_rows` rows.

    The parts of the inputs do not depend on the tokens. Up to _MOST_SPLIT_TOKENS tokens they are
    summed by programs of their own; with more tokens, writing and adding float32 takes longer.
    """
    splits = parts if num_tokens <= _MOST_SPLIT_TOKENS else 1
    costs = _invariant_costs(num_tokens, splits, parts // splits)
    multiprocessors = gpu_of(device).multiprocessors

    def cost(tiles: WideTiles) -> float:
        return costs[tiles] * -(-tiles.count(num_tokens, num_rows) * splits // multiprocessors)

    return replace(min(costs, key=cost), splits=splits, parts=parts // splits)


def _invariant_costs(num_tokens: int, splits: int, parts: int) -> dict[WideTiles, float]:
    """Returns the tiles to choose from, few as in _candidates, and their relative times."""
    if splits > 1:
        return hopper.WIDE_SPLIT
    if parts > 1:
        return hopper.WIDE_PARTS[parts]
    if num_tokens <= _FEW_TOKENS:
        return hopper.WIDE_FEW_TOKENS
    return hopper.WIDE_HALF_TILE if _leaves_half_a_tile(num_tokens) else hopper.WIDE_MANY_TOKENS
