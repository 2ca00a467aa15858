"""Products of experts of 4 bits with few tokens each on Hopper; see few_token_kernel."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.kernels.experts.packed.expert_product import ExpertProduct, ProductShape
from models.kernels.experts.packed.few_token_kernel import GROUP_ROWS, few_token_kernel
from models.kernels.experts.packed.matrix_experts import described, words_of
from models.kernels.gpu import num_multiprocessors
from models.kernels.launching.dependent_launch import launch_options
from models.kernels.launching.launch import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTokenTiles:
    """Shape of one program.

    tokens: height of a tile, 8 to 32.
    groups: of four warps that multiply 64 rows each, gate and up together; 2 or 4.
    columns: inputs of a step, 64 or 128.
    slots: steps of the ring.
    programs: of a multiprocessor.
    most_inputs: in MXFP4, of tokens that fit the shared memory beside the ring.
    registers: of a thread at first, then in a group that multiplies and in the warp that fetches.
    """

    tokens: int
    groups: int
    columns: int
    slots: int
    programs: int
    most_inputs: int
    registers: tuple[int, int, int]

    @property
    def rows(self) -> int:
        """Rows of the matrix, of all groups."""
        return int(GROUP_ROWS.value) * self.groups

    def has_room(self, num_inputs: int, words_of_columns: int) -> bool:
        """Returns whether products of `num_inputs` have room.

        words_of_columns: words of scales of 128 columns of a row.
        """
        # Beyond the one of MXFP4 they take the memory of inputs, which have two bytes.
        taken = (words_of_columns - 1) * 4 * self.rows * self.slots // (2 * self.tokens)
        return num_inputs + taken <= self.most_inputs


_TWO_PROGRAMS = FewTokenTiles(
    tokens=8, groups=2, columns=128, slots=7, programs=2, most_inputs=2944, registers=(80, 88, 64)
)
_ONE_PROGRAM = FewTokenTiles(
    tokens=16, groups=4, columns=128, slots=6, programs=1, most_inputs=2304,
    registers=(96, 104, 64),
)  # fmt: skip
FEW_TOKEN_TILES = {
    8: (_TWO_PROGRAMS,),
    16: (_ONE_PROGRAM,),
    32: (
        replace(_ONE_PROGRAM, tokens=32, slots=4),
        replace(_ONE_PROGRAM, tokens=32, columns=64, slots=4, most_inputs=2880),
    ),
}
"""By expert_forms.tile_rows; a product takes the first that has room for its inputs.

Measured with gpt-oss-20b (H200, 2026-11-26; us of gate and up, and of down). 8 tokens: 62.1 and
30.5, in tiles of expert_kernel 68.4 and 35.0, in one program with 4 groups 62.8 and 32.5, in two
with 64 rows and 256 inputs 65.3 and 32.6. 32 tokens: 92.1 and 45.9, there 96.0 and 51.2, 93.3 and
48.1, 90.6 and 48.8. 128 tokens: 119.6 and 61.0, in tiles of expert_kernel 119.7 and 66.3, with 2
groups and 128 inputs 120.4 and 72.3.

With Qwen3-30B-A3B in groups of 128 (H100, 2026-11-26). 32 tokens: 82.2 and 39.8, in tiles of
expert_kernel 79.4 and 45.8. 128 tokens: 88.8 and 44.9, there 90.5 and 54.1. 256 tokens: 94.2 and
49.0 with 128 inputs, 101.2 and 53.8 with 64, there 99.1 and 69.1.
"""


def few_token_tiles(height: int, product: ExpertProduct) -> FewTokenTiles | None:
    """Returns the tiles of a height for a product; None if the kernel does not take it."""
    words, _group = words_of(product.scale)
    fitting = (
        tiles
        for tiles in FEW_TOKEN_TILES.get(height, ())
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
