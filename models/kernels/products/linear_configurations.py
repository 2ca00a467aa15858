"""Chooses the kernel of a product of few tokens, from a table: nothing is tuned while serving.

Measured with `python -m tests.bench.skinny_linear`, then in whole steps, on an H200 with the shapes
of Qwen3-8B and Qwen3-0.6B (2026-11).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from models.kernels.gpu import gpu_of
from models.kernels.launching.copy_engine import COPY_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorTiles:
    """Scalar products: outputs of a program, inputs of a tile, warps."""

    rows: int
    columns: int
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixTiles:
    """Tensor cores: tokens; rows of the weight, gate and up together; inputs of a tile.

    tokens: 8 to 64, a power of two.
    rows: 64 or 128.
    columns: 64, 128 or 256.
    num_stages: tiles of a warp group's ring.
    groups: warp groups of a program, 1 to 3, which take turns at the tiles.
    splits: parts of the inputs, each summed by programs of its own.
    """

    tokens: int
    rows: int
    columns: int
    num_stages: int
    groups: int = 1
    splits: int = 1

    def unsplit(self) -> "MatrixTiles":
        """Returns the tiles for a caller that needs the whole sum."""
        return self if self.splits == 1 else _unsplit(self)


Tiles = VectorTiles | MatrixTiles

MOST_TOKENS = 64
"""Products of more tokens are torch's or those of wide_configurations, but for few outputs."""
MOST_TOKENS_OF_FEW_OUTPUTS = 128
"""More were not measured."""
_COLUMNS = 256
"""Inputs of a tile, but for gated products."""
_SPLIT_OUTPUTS = 8448
"""Outputs times parts at most in batch-invariant mode: a program for each multiprocessor.

5120 outputs of 2048 inputs took 10.0 us in one part and 13.4 in two with 64 tokens, 16.1 and 25.7
with 256, and 235 and 317 with 8192 (H100, 2026-11).
"""
_WHOLE_OUTPUTS = 6144
"""Up to this many, products of 33 to 64 tokens whose halves would make a second wave are whole.

With 40 and 64 tokens 5120 outputs of 4096 inputs took 20.4 and 21.0 us with the norm, torch's 21.8
and 22.1, in halves 23.4 and 23.5; 6144 of 4096 alone 21.4 and 22.0, torch's 24.0 and 22.6. Of 5120
inputs 7168 and more are alike (H100, 2026-11-26).
"""
_SHORT_INPUTS = 1024
"""Up to this many are one part, and with 33 to 64 tokens torch's product is faster."""
_SCARCE_OUTPUTS = 256
"""Up to this many outputs, as of a router, make too few programs for more than two tokens."""
_FEW_OUTPUTS = 64
"""Up to this many are one tile of rows, whose inputs warp groups of one program share."""
_FEW_OUTPUT_TILES = MatrixTiles(tokens=8, rows=64, columns=_COLUMNS, num_stages=2, groups=3)
"""Of few outputs. More programs of fewer tokens are faster, though each reads the whole weight.

The norm, a router of 32 outputs and 2880 inputs, routing and sorting took 8.2, 8.4, 9.0 and 9.0 us
with 8, 32, 64 and 128 tokens, 9.7, 10.7, 10.8 and 11.2 with torch's product, 9.1 and 10.0 in one
group of 8 and 32 tokens, and 9.2 and 9.8 in two of 32 with 64 and 128 (H200, 2026-11-26).
"""


@lru_cache(maxsize=1024)
def skinny_tiles(
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    *,
    is_gated: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tiles | None:
    """Returns the tiles of the product [T, K] x [N, K]^T; None where torch's is faster.

    Sizes are those of the result: a gated product reads 2 * N rows. Unmeasured devices and dtypes
    use torch's product.
    """
    if dtype is not torch.bfloat16 or not gpu_of(device).is_hopper:
        return None
    if num_tokens <= 2:
        return _hopper_vector_tiles(num_tokens, num_outputs, num_inputs, is_gated=is_gated)
    if num_inputs * dtype.itemsize % COPY_ALIGNMENT:
        return None
    if num_outputs <= _SCARCE_OUTPUTS:
        is_ours = num_outputs <= _FEW_OUTPUTS and num_tokens <= MOST_TOKENS_OF_FEW_OUTPUTS
        return _FEW_OUTPUT_TILES if is_ours and not is_gated else None
    if num_tokens > MOST_TOKENS:
        return None
    # Up to 8, 16, 32 or 64 tokens.
    tokens = max(8, 1 << (num_tokens - 1).bit_length())
    return _hopper_matrix_tiles(tokens, num_outputs, num_inputs, is_gated=is_gated)


@lru_cache(maxsize=1024)
def fp8_vector_tiles(
    num_outputs: int, num_inputs: int, *, is_gated: bool, dtype: torch.dtype, device: torch.device
) -> VectorTiles | None:
    """Returns the tiles of one token's product with an FP8 weight; None where it is rounded."""
    if dtype is not torch.bfloat16 or not gpu_of(device).is_hopper:
        return None
    is_large = num_outputs > 5120 or num_inputs >= 8192
    if num_inputs < 2048 or (is_gated and num_inputs < 4096):
        rows = 8 if is_large and not is_gated else 4
        return VectorTiles(rows=rows, columns=1024, num_warps=4)
    if is_gated:
        return VectorTiles(rows=4, columns=4096, num_warps=8)
    if num_outputs > 5120:
        return VectorTiles(rows=16, columns=2048, num_warps=8)
    if num_inputs >= 8192:
        return VectorTiles(rows=4, columns=4096, num_warps=16)
    return VectorTiles(rows=4, columns=2048, num_warps=8)


def _hopper_vector_tiles(
    num_tokens: int, num_outputs: int, num_inputs: int, *, is_gated: bool
) -> VectorTiles:
    """Returns the tiles of one or two tokens: long rows need long tiles."""
    if num_inputs >= 4096:
        if num_tokens == 2 and 5120 < num_outputs <= 8192 and not is_gated:
            return VectorTiles(rows=4, columns=512, num_warps=2)
        if num_tokens == 2:
            return VectorTiles(rows=4, columns=2048, num_warps=8)
        if num_outputs <= 5120:
            return VectorTiles(rows=8, columns=2048, num_warps=4)
        return VectorTiles(rows=4, columns=4096, num_warps=8)
    if num_inputs >= 2048:
        return VectorTiles(rows=2, columns=2048, num_warps=4)
    if is_gated:
        return VectorTiles(rows=4, columns=512, num_warps=2)
    return VectorTiles(rows=4, columns=1024, num_warps=2 * num_tokens)


def _hopper_matrix_tiles(
    tokens: int, num_outputs: int, num_inputs: int, *, is_gated: bool
) -> MatrixTiles | None:
    """Returns the tiles of 3 to 64 tokens.

    A gated product makes many programs, three per multiprocessor. Other products make few, with
    long rings; where they are too few, the inputs are split. With 33 to 64 tokens they are not
    where halves would be more programs than multiprocessors.
    """
    if is_gated:
        return _gated_matrix_tiles(tokens)
    splits = _num_splits(num_outputs, num_inputs)
    if tokens == 64:
        if num_inputs <= _SHORT_INPUTS or num_outputs > _WHOLE_OUTPUTS:
            return None
        if 2 * num_outputs > _SPLIT_OUTPUTS:
            splits = 1
    stages = 4 if tokens <= 16 else 3
    return MatrixTiles(tokens=tokens, rows=64, columns=_COLUMNS, num_stages=stages, splits=splits)


def _gated_matrix_tiles(tokens: int) -> MatrixTiles:
    stages = {8: 4, 16: 3, 32: 3, 64: 2}[tokens]
    return MatrixTiles(tokens=tokens, rows=64, columns=128, num_stages=stages)


@lru_cache(maxsize=1024)
def invariant_matrix_tiles(
    num_tokens: int, num_outputs: int, num_inputs: int, *, is_gated: bool = False
) -> MatrixTiles:
    """Returns the tiles of batch-invariant mode for a weight of `num_outputs` rows."""
    tokens = max(8, 1 << (num_tokens - 1).bit_length())
    if is_gated:
        return _gated_matrix_tiles(tokens)
    return MatrixTiles(
        tokens=tokens,
        rows=64,
        columns=_COLUMNS,
        num_stages=4 if tokens <= 16 else 3,
        splits=invariant_splits(num_outputs, num_inputs),
    )


def invariant_splits(num_outputs: int, num_inputs: int) -> int:
    """Returns the parts of a weight's inputs in batch-invariant mode, for any number of tokens.

    Few outputs make too few programs. Parts are whole tiles of every kernel.
    """
    splits = 1
    while (
        num_outputs * 2 * splits <= _SPLIT_OUTPUTS
        and splits < 4
        and num_inputs % (2 * splits * _COLUMNS) == 0
        and num_inputs > 1024 * splits
    ):
        splits *= 2
    return splits


def _num_splits(num_outputs: int, num_inputs: int) -> int:
    """Returns the parts of the inputs that make enough programs of few outputs."""
    splits = 1
    if num_outputs <= 5120:
        while (
            splits < 4 and num_outputs * splits < 128 * 64 and num_inputs > _SHORT_INPUTS * splits
        ):
            splits *= 2
    return splits


@lru_cache
def _unsplit(tiles: MatrixTiles) -> MatrixTiles:
    return replace(tiles, splits=1)
