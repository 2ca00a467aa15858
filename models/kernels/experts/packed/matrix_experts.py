"""Products of experts of 4 bits on Hopper's tensor cores; expert_kernel describes how."""

from functools import lru_cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.kernels.experts.expert_forms import ON_CORES, tile_rows
from models.kernels.experts.packed.expert_kernel import expert_kernel
from models.kernels.experts.packed.expert_product import (
    ExpertProduct,
    ProductShape,
    ungated_product,
)
from models.kernels.experts.pair_order import PairOrder
from models.kernels.launching.dependent_launch import launch_options
from models.kernels.launching.launch import Launch
from models.kernels.tuning.hopper import EXPERTS, EXPERTS_ALONE
from models.kernels.tuning.tiles import ExpertTiles
from models.operands.run_scales import COLUMNS

_SHORT_INPUTS = 1024
_SHORT_TILES = EXPERTS[64][1]
"""For more tokens, too, where a product has few inputs and a program thus few steps.

Measured with 768 inputs, down of Qwen3-30B-A3B in groups of 128 (H100, 2026-11-26): 2048 tokens
took 148 us, in tiles of 128 164, in tiles of 256 214.
"""


def sorted_tiles(height: int, shape: ProductShape) -> ExpertTiles:
    """Returns the tiles of a product, by expert_forms.tile_rows."""
    if height > _SHORT_TILES.tokens and shape.num_inputs <= _SHORT_INPUTS:
        return _SHORT_TILES
    return EXPERTS[height][0 if shape.is_gated else 1]


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


def packed_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    order: PairOrder,
    num_parts: int = 1,
) -> torch.Tensor:
    """Returns the product of each pair with its expert's matrix, [T * top_k, N], by token.

    Args:
        x: [T * top_k, K] bfloat16, contiguous, in the order of the pairs.
        weight: [E, N, K / 2]. It stacks num_parts matrices.
        scale: of models.ops.experts.expert_formats.
        bias: [E, N].
        order: of the pairs.
        num_parts: matrices whose scales take turns.
    """
    assert scale is not None, "the weights are of 4 bits"
    ids = order.pairs.view(-1, order.top_k)  # if pairs are alone; else its shape counts
    product = ungated_product(x, ids, weight, scale, bias, num_parts=num_parts)
    if order.is_alone:
        expert_product(product, None, EXPERTS_ALONE)
    else:
        height = tile_rows(order.num_pairs, order.num_choices, ON_CORES)
        expert_product(product, (order.pairs, order.starts), sorted_tiles(height, product.shape))
    return product.output


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
        expert_kernel, GROUP=group, PARTS=shape.num_parts, IS_ALONE=is_alone, TOKENS=tiles.tokens,
        ROWS=tiles.rows, COLUMNS=tiles.columns, STAGES=tiles.num_stages,
        UNPACKED=tiles.num_unpacked, LAST_TOKENS=tiles.last_tokens,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
        BLOCK_E=triton.next_power_of_2(shape.num_experts), num_warps=tiles.num_warps,
        **shape.constants, **launch_options(device),
    )  # fmt: skip
