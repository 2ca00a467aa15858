"""Products of experts of 4 bits with few tokens each on Hopper; see few_token_kernel."""

from functools import lru_cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.kernels.experts.packed.expert_product import ExpertProduct, ProductShape
from models.kernels.experts.packed.few_token_kernel import few_token_kernel
from models.kernels.experts.packed.matrix_experts import described, words_of
from models.kernels.gpu import num_multiprocessors
from models.kernels.launching.dependent_launch import launch_options
from models.kernels.launching.launch import Launch
from models.kernels.tuning.hopper import FEW_TOKEN_EXPERTS
from models.kernels.tuning.tiles import FewTokenTiles


def few_token_tiles(height: int, product: ExpertProduct) -> FewTokenTiles | None:
    """Returns the tiles of a height for a product; None if the kernel does not take it."""
    words, _group = words_of(product.scale)
    fitting = (
        tiles
        for tiles in FEW_TOKEN_EXPERTS.get(height, ())
        if tiles.has_room(product.shape.num_inputs, words.shape[-1])
    )
    return next(fitting, None)


def few_token_product(
    product: ExpertProduct, order: tuple[torch.Tensor, torch.Tensor], tiles: FewTokenTiles
) -> None:
    """Does what moe.packed.matrix_experts.expert_product does, for sorted pairs."""
    words, group = words_of(product.scale)
    _launcher(product.shape, group, tiles, product.device)(
        (tiles.programs * num_multiprocessors(product.device), 1, 1),
        described(product.weight, product.shape.num_outputs, tiles.rows, tiles.columns),
        _described_scales(words, tiles.rows), product.x, words, product.bias, *order,
        product.output, product.alpha, product.limit,
    )  # fmt: skip


def _described_scales(words: torch.Tensor, tile_rows: int) -> TensorDescriptor:
    """Describes words of scales, [E, words of a row, rows, each], to the copy engine."""
    num_experts, num_words, num_rows, each = words.shape
    return TensorDescriptor(
        words,
        [num_experts * num_words, num_rows * each],
        [num_rows * each, 1],
        [1, tile_rows * each],
        gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2),
    )


@lru_cache
def _launcher(
    shape: ProductShape, group: int | None, tiles: FewTokenTiles, device: torch.device
) -> Launch:
    first, multiplying, fetching = tiles.registers
    return Launch(
        few_token_kernel, GROUP=group, TOKENS=tiles.tokens, GROUPS=tiles.groups,
        COLUMNS=tiles.columns, SLOTS=tiles.slots,
        BLOCK_E=max(32, triton.next_power_of_2(shape.num_experts)), num_warps=4, maxnreg=first,
        GROUP_REGISTERS=multiplying, LOAD_REGISTERS=fetching,
        **shape.constants, **launch_options(device),
    )  # fmt: skip
