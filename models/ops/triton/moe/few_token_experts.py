"""Products of experts of 4 bits with few tokens each on Hopper; see few_token_kernel."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.ops.operands.experts import ExpertWeights
from models.ops.triton.launching.dependent_launch import launch_options
from models.ops.triton.launching.launch import Launch
from models.ops.triton.moe.few_token_kernel import GROUP_ROWS, few_token_kernel
from models.ops.triton.moe.matrix_experts import ExpertShape, described, words_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTokenTiles:
    """Shape of one program.

    groups: of four warps that multiply 64 rows each, gate and up together; 2 or 4.
    columns: inputs of a step, 64 or 128.
    slots: steps of the ring.
    programs: of a multiprocessor.
    most_inputs: of an expert of MXFP4, whose tokens fit the shared memory beside the ring.
    registers: of a thread at first, then in a group that multiplies and in the warp that fetches.
    """

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


FEW_TOKEN_TILES = {
    8: FewTokenTiles(
        groups=2, columns=128, slots=7, programs=2, most_inputs=2944, registers=(80, 88, 64)
    ),
    32: FewTokenTiles(
        groups=4, columns=64, slots=4, programs=1, most_inputs=2880, registers=(96, 104, 64)
    ),
}
"""By expert_forms.tile_rows, the height of a tile of tokens.

Measured with gpt-oss-20b (H200, 2026-11-26; us of gate and up, and of down). 8 tokens: 62.1 and
30.5, in tiles of expert_kernel 68.4 and 35.0, in one program with 4 groups 62.8 and 32.5, in two
with 64 rows and 256 inputs 65.3 and 32.6. 32 tokens: 92.1 and 45.9, there 96.0 and 51.2, 93.3 and
48.1, 90.6 and 48.8. 128 tokens: 119.6 and 61.0, in tiles of expert_kernel 119.7 and 66.3, with 2
groups and 128 inputs 120.4 and 72.3.
"""


def has_room(height: int, experts: ExpertWeights) -> bool:
    """Returns whether the kernel takes tiles of a height for these experts."""
    tiles = FEW_TOKEN_TILES.get(height)
    if tiles is None:
        return False
    assert experts.gate_up_scale is not None, "the weights are of 4 bits"
    assert experts.down_scale is not None, "the weights are of 4 bits"
    # Words of scales beyond one of a row take the memory of inputs, which have two bytes.
    most_words = max(
        words_of(each)[0].shape[-1] for each in (experts.gate_up_scale, experts.down_scale)
    )
    taken = (most_words - 1) * 4 * tiles.rows * tiles.slots // (2 * height)
    return max(experts.down.shape[1], experts.inner_size) + taken <= tiles.most_inputs


def few_token_products(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    order: tuple[torch.Tensor, torch.Tensor],
    height: int,
) -> torch.Tensor:
    """Does what models.ops.triton.moe.matrix_experts.expert_products does, for sorted pairs.

    height: of a tile of tokens; one of FEW_TOKEN_TILES.
    """
    tiles = FEW_TOKEN_TILES[height]
    num_pairs = ids.numel()
    assert experts.gate_up_scale is not None, "the weights are of 4 bits"
    assert experts.down_scale is not None, "the weights are of 4 bits"
    between = hidden.new_empty(num_pairs, experts.inner_size)
    results = hidden.new_empty(num_pairs, hidden.shape[1])
    pairs, starts = order
    gate_up_bias, down_bias = experts.biases_or(hidden)
    shape = ExpertShape.of(experts, ids.shape[1], is_alone=False)
    properties = torch.cuda.get_device_properties(hidden.device)
    for x, weight, scale, bias, output, is_gated in (
        (hidden, experts.gate_up, experts.gate_up_scale, gate_up_bias, between, True),
        (between, experts.down, experts.down_scale, down_bias, results, False),
    ):
        num_outputs = output.shape[1]
        words, group = words_of(scale)
        _launcher(num_outputs, x.shape[1], group, shape, height, is_gated, hidden.device)(
            (tiles.programs * properties.multi_processor_count, 1, 1),
            described(weight, num_outputs, tiles.rows, tiles.columns),
            _described_scales(words, tiles.rows), x, words, bias, pairs, starts, output,
            experts.alpha, experts.limit or 0.0,
        )  # fmt: skip
    return results


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
    num_outputs: int,
    num_inputs: int,
    group: int | None,
    shape: ExpertShape,
    height: int,
    is_gated: bool,
    device: torch.device,
) -> Launch:
    tiles = FEW_TOKEN_TILES[height]
    first, multiplying, fetching = tiles.registers
    return Launch(
        few_token_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, GROUP=group,
        NUM_EXPERTS=shape.num_experts, TOP_K=shape.top_k, IS_GATED=is_gated,
        HAS_BIAS=shape.has_bias, IS_CLAMPED=shape.is_clamped, TOKENS=height, GROUPS=tiles.groups,
        COLUMNS=tiles.columns, SLOTS=tiles.slots,
        BLOCK_E=max(32, triton.next_power_of_2(shape.num_experts)), num_warps=4, maxnreg=first,
        GROUP_REGISTERS=multiplying, LOAD_REGISTERS=fetching, **launch_options(device),
    )  # fmt: skip
