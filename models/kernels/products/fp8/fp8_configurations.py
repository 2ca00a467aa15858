"""Chooses the tiles of products whose factors are both FP8, from Hopper's tables."""

from dataclasses import replace
from functools import lru_cache

import torch

from models.kernels.gpu import gpu_of
from models.kernels.launching.copy_engine import COPY_ALIGNMENT
from models.kernels.tuning.hopper import FP8_MOST_ROWS, FP8_TWO_PRODUCTS, FP8_WIDE
from models.kernels.tuning.tiles import GROUP_ROWS, NarrowFP8Tiles, WideFP8Tiles
from models.number_formats import BLOCK

FP8_TOKENS = 128
"""Tokens of a wide tile, for two warp groups."""
LEAST_SCALES = 32
"""Scales that the copy engine loads at least: it fills shared memory from every 128 bytes on."""
_MOST_NARROW_TOKENS = 64
_PART_INPUTS = 512
"""Least inputs of a part."""
_LONG_PART_INPUTS = 2048
"""Least inputs of a part of which a multiprocessor has two."""
_SHARED_BYTES = 233472
"""Shared memory of a multiprocessor; each program takes 1 KiB that it cannot use."""


_MOST_SPLITS = 4
_ADDING_COST = 1.1e-3
"""Relative time of another part's sums: times tokens and outputs, over inputs.

With the norm that follows, 4096 x 12288 took 36 us in halves with 192 tokens and 87 with 576, whole
43 and 95; 8192 x 28672 185 with 384 and 304 with 576, whole 204 and 317. With 640 and 768 tokens of
the first both are alike, with 1152 it took 147, whole 137 (H200, 2026-11).
"""
_START_COST = 1150
"""Relative time of a wave's start and end, over inputs: parts make more waves.

80 tiles of 5120 outputs leave a third of the multiprocessors idle, but as thirds have two waves.
With 256 tokens 25600 inputs took 90.8 us in thirds, whole 96.1, but 17408 (by row) 66.8, whole
58.5. With 900 tokens 25600 inputs took 303 in halves, of five waves, whole 289 of three (H100,
2026-11-26).
"""
BUILT_TOKENS = (128, 256, 512, 520)
"""Tokens of steps whose kernels are built before serving; parts that none of them has are not used.
"""


@lru_cache(maxsize=1024)
def fp8_tiles(
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    *,
    may_split: bool,
    device: torch.device,
) -> NarrowFP8Tiles | WideFP8Tiles | None:
    """Returns the tiles of the product [T, K] x [N, K]^T; None where ours does not run.

    may_split: the caller takes addends.
    """
    if not _takes(num_inputs, device):
        return None
    count = gpu_of(device).multiprocessors
    size = (num_outputs, num_inputs)
    if num_tokens <= _MOST_NARROW_TOKENS:
        splits = _narrow_splits(*size, count) if may_split else 1
        return _narrow(num_tokens, *size, splits, count)
    whole = _whole(num_tokens, num_outputs, count)
    if not may_split:
        return whole
    split = _split(whole, num_tokens, *size, count)
    is_built = any(
        split == _split(_whole(each, num_outputs, count), each, *size, count)
        for each in BUILT_TOKENS
        if _num_token_tiles(each) <= _num_token_tiles(num_tokens)
    )
    return split if is_built else whole


def _num_token_tiles(num_tokens: int) -> int:
    return -(-num_tokens // FP8_TOKENS)


def _whole(num_tokens: int, num_outputs: int, multiprocessors: int) -> WideFP8Tiles:
    def num_waves(tiles: WideFP8Tiles) -> int:
        return -(-_count(tiles, num_tokens, num_outputs) // multiprocessors)

    best, cost = min(
        ((tiles, cost * num_waves(tiles)) for tiles, cost in FP8_WIDE.items()),
        key=lambda pair: pair[1],
    )
    return FP8_TWO_PRODUCTS if num_waves(FP8_TWO_PRODUCTS) < cost else best


def _split(
    whole: WideFP8Tiles, num_tokens: int, num_outputs: int, num_inputs: int, multiprocessors: int
) -> WideFP8Tiles:
    """Returns tiles of parts of the inputs, if they fill multiprocessors better than the whole.

    One tile of tokens waits for the weight, which halves load as fast: with 96 tokens and 5120
    outputs thirds took 4 to 9 % longer (H100, 2026-11-26).
    """
    if whole is FP8_TWO_PRODUCTS:
        return whole
    most = min(_MOST_SPLITS, num_inputs // _PART_INPUTS)
    fitting = min(most, multiprocessors // _count(whole, num_tokens, num_outputs))
    if fitting > 1:
        return replace(whole, splits=fitting)
    if _num_token_tiles(num_tokens) == 1:
        most = min(most, 2)
    count = _count(FP8_MOST_ROWS, num_tokens, num_outputs)
    adding = _ADDING_COST * num_tokens * num_outputs / num_inputs
    start = _START_COST / num_inputs

    def cost(splits: int) -> float:
        num_waves = -(-count // (multiprocessors // splits))
        return num_waves * (FP8_WIDE[FP8_MOST_ROWS] / splits + start) + adding * (splits - 1)

    whole_waves = -(-_count(whole, num_tokens, num_outputs) // multiprocessors)
    whole_cost = whole_waves * (FP8_WIDE[whole] + start)
    splits = min(range(2, most + 1), key=cost, default=1)
    is_faster = splits > 1 and cost(splits) < whole_cost
    return replace(FP8_MOST_ROWS, splits=splits) if is_faster else whole


def _count(tiles: WideFP8Tiles, num_tokens: int, num_outputs: int) -> int:
    return _num_token_tiles(num_tokens) * -(-num_outputs // (tiles.rows * tiles.products))


@lru_cache(maxsize=1024)
def gated_fp8_tiles(
    num_tokens: int, num_outputs: int, num_inputs: int, *, is_rounded: bool, device: torch.device
) -> NarrowFP8Tiles | WideFP8Tiles | None:
    """Returns the tiles of a gated product of 2 * N rows; None where ours does not run.

    is_rounded: whether each 128 results are rounded with a scale of their own.
    """
    if not _takes(num_inputs, device):
        return None
    if num_tokens > _MOST_NARROW_TOKENS:
        return FP8_TWO_PRODUCTS
    tokens = _padded(num_tokens)
    if not is_rounded:
        return _with_slots(tokens, num_inputs, groups=1, programs=2, halves=2)
    programs = 2 if tokens <= 16 else 1
    return _with_slots(tokens, num_inputs, groups=2, programs=programs, halves=2)


def _takes(num_inputs: int, device: torch.device) -> bool:
    return gpu_of(device).is_hopper and num_inputs % COPY_ALIGNMENT == 0


def _padded(num_tokens: int) -> int:
    """Returns the tokens of a narrow tile: 8, 16, 32 or 64."""
    return max(8, 1 << (num_tokens - 1).bit_length())


def _narrow(
    num_tokens: int, num_outputs: int, num_inputs: int, splits: int, multiprocessors: int
) -> NarrowFP8Tiles:
    tokens = _padded(num_tokens)
    count = splits * -(-num_outputs // GROUP_ROWS)
    is_one_wave = tokens == _MOST_NARROW_TOKENS and count <= multiprocessors
    programs = 1 if is_one_wave else 2
    return _with_slots(tokens, num_inputs, groups=1, programs=programs, splits=splits)


def _narrow_splits(num_outputs: int, num_inputs: int, multiprocessors: int) -> int:
    """Returns the parts of the inputs: few outputs make too few programs, long inputs long ones."""
    splits = 1
    num_tiles = -(-num_outputs // GROUP_ROWS)
    while splits < 4:  # the next norm reads every part
        part, programs = num_inputs // (2 * splits), 2 * splits * num_tiles
        fills = programs <= multiprocessors and part >= _PART_INPUTS
        fills_twice = programs <= 2 * multiprocessors and part >= _LONG_PART_INPUTS
        if not fills and not fills_twice:
            break
        splits *= 2
    return splits


def _with_slots(
    tokens: int, num_inputs: int, *, groups: int, programs: int, halves: int = 1, splits: int = 1
) -> NarrowFP8Tiles:
    """Returns tiles with as many slots as fit into shared memory beside the rest, or as needed."""
    num_blocks = -(-num_inputs // BLOCK)
    tables = 2 * groups * (1 << (num_blocks - 1).bit_length()) * 4
    results = groups * tokens * (GROUP_ROWS + 1) * 4
    room = _SHARED_BYTES // programs - 1024 - 512 - 1024 - tables - results
    slot = (groups * GROUP_ROWS * halves + tokens) * BLOCK + max(LEAST_SCALES, tokens) * 4 + 16
    slots = max(2, min(-(-num_blocks // splits), room // slot))
    return NarrowFP8Tiles(
        tokens=tokens, groups=groups, programs=programs, slots=slots, splits=splits
    )
