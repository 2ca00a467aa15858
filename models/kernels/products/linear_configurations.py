"""Chooses the kernel of a product of few tokens, from the GPU's tables."""

from dataclasses import replace
from functools import lru_cache

import torch

from models.kernels.gpu import gpu_of
from models.kernels.launching.copy_engine import COPY_ALIGNMENT
from models.kernels.tuning import hopper
from models.kernels.tuning.registry import tables_of
from models.kernels.tuning.table import look_up
from models.kernels.tuning.tiles import MatrixTiles, VectorTiles

Tiles = VectorTiles | MatrixTiles

MOST_TOKENS = 64
"""Products of more tokens are torch's or those of wide_configurations, but for few outputs."""
MOST_TOKENS_OF_FEW_OUTPUTS = 128
"""More were not measured."""
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
    if dtype is not torch.bfloat16:
        return None
    gpu = gpu_of(device)
    if num_tokens <= 2:
        return look_up(tables_of(gpu).vectors, num_tokens, is_gated, num_outputs, num_inputs)
    if not gpu.is_hopper or num_inputs * dtype.itemsize % COPY_ALIGNMENT:
        return None
    if num_outputs <= _SCARCE_OUTPUTS:
        is_ours = num_outputs <= _FEW_OUTPUTS and num_tokens <= MOST_TOKENS_OF_FEW_OUTPUTS
        return hopper.FEW_OUTPUTS if is_ours and not is_gated else None
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
    if dtype is not torch.bfloat16:
        return None
    return look_up(tables_of(gpu_of(device)).fp8_vectors, is_gated, num_outputs, num_inputs)


def _hopper_matrix_tiles(
    tokens: int, num_outputs: int, num_inputs: int, *, is_gated: bool
) -> MatrixTiles | None:
    """Returns the tiles of 3 to 64 tokens.

    Where few outputs make too few programs, the inputs are split; with 33 to 64 tokens not where
    halves would be more programs than multiprocessors.
    """
    if is_gated:
        return hopper.GATED_MATRICES[tokens]
    splits = _num_splits(num_outputs, num_inputs)
    if tokens == 64:
        if num_inputs <= _SHORT_INPUTS or num_outputs > _WHOLE_OUTPUTS:
            return None
        if 2 * num_outputs > _SPLIT_OUTPUTS:
            splits = 1
    return replace(hopper.MATRICES[tokens], splits=splits)


@lru_cache(maxsize=1024)
def invariant_matrix_tiles(
    num_tokens: int, num_outputs: int, num_inputs: int, *, is_gated: bool = False
) -> MatrixTiles:
    """Returns the tiles of batch-invariant mode for a weight of `num_outputs` rows."""
    tokens = max(8, 1 << (num_tokens - 1).bit_length())
    if is_gated:
        return hopper.GATED_MATRICES[tokens]
    return replace(hopper.MATRICES[tokens], splits=invariant_splits(num_outputs, num_inputs))


def invariant_splits(num_outputs: int, num_inputs: int) -> int:
    """Returns the parts of a weight's inputs in batch-invariant mode, for any number of tokens.

    Few outputs make too few programs. Parts are whole tiles of every kernel.
    """
    splits = 1
    while (
        num_outputs * 2 * splits <= _SPLIT_OUTPUTS
        and splits < 4
        and num_inputs % (2 * splits * hopper.MATRICES[8].columns) == 0
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
