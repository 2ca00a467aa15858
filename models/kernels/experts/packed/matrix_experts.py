"""Products of experts of 4 bits on Hopper's tensor cores; expert_kernel describes how."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.kernels.experts.packed.expert_kernel import expert_kernel
from models.kernels.experts.packed.expert_product import ExpertProduct, ProductShape
from models.kernels.launching.dependent_launch import launch_options
from models.kernels.launching.launch import Launch
from models.operands.run_scales import COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """Shape of one program.

    tokens: 8 to 256, a power of two.
    rows: of the matrix, gate and up together; a multiple of 16 * num_warps.
    columns: inputs of a tile, 64 to 256.
    num_stages: tiles of the ring, of which one is multiplied.
    num_warps: 4 or 8.
    num_unpacked: 2 unpacks a tile while the one before is multiplied, with twice the registers.
    last_tokens: height of an expert's last tile where its tokens fit; for the other ones `tokens`.
    max_registers: of a thread, so that two programs fit a multiprocessor; None for no limit.
    """

    tokens: int
    rows: int
    columns: int
    num_stages: int
    num_warps: int
    num_unpacked: int
    last_tokens: int
    max_registers: int | None


def _tiles(
    tokens: int,
    rows: int,
    columns: int,
    num_stages: int,
    num_warps: int = 4,
    *,
    max_registers: int | None = None,
) -> ExpertTiles:
    return ExpertTiles(
        tokens=tokens, rows=rows, columns=columns, num_stages=num_stages, num_warps=num_warps,
        num_unpacked=2 if tokens >= _FULL_TOKENS else 1,
        last_tokens=_LAST_TOKENS.get(tokens, tokens), max_registers=max_registers,
    )  # fmt: skip


_FULL_TOKENS = 256
"""One program of such tiles fills a multiprocessor, and no other keeps its cores busy."""
_LAST_TOKENS = {64: 16, 128: 64, 256: 64}
"""By height of the other tiles: about half of the last tiles have few tokens."""
_HIGH = _tiles(128, 128, 64, 4, 8, max_registers=128)
ALONE_TILES = _tiles(8, 64, 256, 5)
"""For pairs computed alone."""
SORTED_TILES = {
    8: (_tiles(8, 64, 256, 3), _tiles(8, 64, 256, 3)),
    16: (_tiles(16, 64, 128, 4), _tiles(16, 64, 256, 3)),
    32: (_tiles(32, 128, 128, 4, 8), _tiles(32, 128, 128, 4, 8)),
    64: (_tiles(64, 128, 128, 3, 8, max_registers=128), _tiles(64, 128, 64, 4)),
    128: (_HIGH, _HIGH),
    256: (_HIGH, _tiles(256, 128, 64, 4, 8)),
}
"""Of gate and up, and of down, by expert_forms.tile_rows.

Measured with gpt-oss-20b (H200, 2026-11-26; us of gate and up, and of down). 128 tokens: 120 and 66
in these tiles, down 74 in tiles of 64 rows. 256 tokens: 158 and 83, gate and up 179 in the tiles of
down. 2048 tokens: 592 and 307, the other way round 605 and 325.
"""
_SHORT_INPUTS = 1024
_SHORT_TILES = SORTED_TILES[64][1]
"""For more tokens, too, where a product has few inputs and a program thus few steps.

Measured with 768 inputs, down of Qwen3-30B-A3B in groups of 128 (H100, 2026-11-26): 2048 tokens
took 148 us, in tiles of 128 164, in tiles of 256 214.
"""


def sorted_tiles(height: int, shape: ProductShape) -> ExpertTiles:
    """Returns the tiles of a product, by expert_forms.tile_rows."""
    if height > _SHORT_TILES.tokens and shape.num_inputs <= _SHORT_INPUTS:
        return _SHORT_TILES
    return SORTED_TILES[height][0 if shape.is_gated else 1]


def expert_product(
    product: ExpertProduct, order: tuple[torch.Tensor, torch.Tensor] | None, tiles: ExpertTiles
) -> None:
    """Computes a product into its output.

    order: of models.kernels.experts.moe_routing.sort_by_expert; rows between both products are in
        it. None computes each pair alone.
    """
    shape, num_pairs = product.shape, len(product.output)
    is_alone = order is None
    num_tiles = num_pairs if is_alone else num_pairs // tiles.tokens + shape.num_experts
    pairs, starts = order or (product.ids, product.ids)
    words, group = words_of(product.scale)
    _launcher(shape, group, tiles, is_alone, product.device)(
        (-(-shape.num_outputs // (tiles.rows // (2 if shape.is_gated else 1))), num_tiles, 1),
        described(product.weight, shape.num_outputs, tiles.rows, tiles.columns), product.x, words,
        product.bias, pairs, starts, product.output, product.alpha, product.limit,
    )  # fmt: skip


def words_of(scale: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """Returns scales as words, [E, words, rows, each], and how many columns share a scale.

    The latter is None for MXFP4; see models.kernels.experts.packed.word_scales.
    """
    group = None if scale.dtype == torch.uint8 else COLUMNS // scale.shape[-1]
    return scale.view(torch.int32), group


def described(
    weight: torch.Tensor, num_outputs: int, tile_rows: int, tile_columns: int
) -> TensorDescriptor:
    """Describes stacked matrices to the copy engine, so that octets of gate and up take turns."""
    num_experts, num_rows, num_bytes = weight.shape
    halves = num_rows // num_outputs
    columns = tile_columns // 2
    return TensorDescriptor(
        weight,
        [num_experts, num_outputs // 8, halves, 8, num_bytes],
        [num_rows * num_bytes, 8 * num_bytes, num_outputs * num_bytes, num_bytes, 1],
        [1, tile_rows // halves // 8, halves, 8, columns],
        gl.NVMMASharedLayout(swizzle_byte_width=min(128, columns), element_bitwidth=8, rank=5),
    )


@lru_cache
def _launcher(
    shape: ProductShape, group: int | None, tiles: ExpertTiles, is_alone: bool, device: torch.device
) -> Launch:
    return Launch(
        expert_kernel, GROUP=group, IS_ALONE=is_alone, TOKENS=tiles.tokens, ROWS=tiles.rows,
        COLUMNS=tiles.columns, STAGES=tiles.num_stages, UNPACKED=tiles.num_unpacked,
        LAST_TOKENS=tiles.last_tokens,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
        BLOCK_E=triton.next_power_of_2(shape.num_experts), num_warps=tiles.num_warps,
        **shape.constants, **launch_options(device),
    )  # fmt: skip
