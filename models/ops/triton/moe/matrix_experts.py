"""Products of experts of 4 bits on Hopper's tensor cores; expert_kernel describes how."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.ops.operands.experts import ExpertWeights
from models.ops.operands.run_scales import COLUMNS
from models.ops.triton.launching.dependent_launch import launch_options
from models.ops.triton.launching.launch import Launch
from models.ops.triton.moe.expert_kernel import expert_kernel


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


_Both = tuple[ExpertTiles, ExpertTiles]


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
ALONE_TILES = _tiles(8, 64, 256, 5), _tiles(8, 64, 256, 5)
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


def expert_products(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    order: tuple[torch.Tensor, torch.Tensor] | None,
    tiles: _Both,
) -> torch.Tensor:
    """Returns the results of pairs of a token and an expert, not yet weighted, [T * top_k, H].

    hidden [T, H] bfloat16 and ids [T, top_k] int32 are contiguous; pairs of experts that are not
    here get no values.
    order: of models.ops.triton.moe.moe_routing.sort_by_expert; None computes each pair alone.
    tiles: of the product with gate and up, and of that with down.
    """
    hidden_size, inner = hidden.shape[1], experts.inner_size
    num_experts, num_pairs = len(experts.down), ids.numel()
    assert experts.gate_up_scale is not None, "the weights are of 4 bits"
    assert experts.down_scale is not None, "the weights are of 4 bits"
    between = hidden.new_empty(num_pairs, inner)
    results = hidden.new_empty(num_pairs, hidden_size)
    pairs, starts = order or (ids, ids)
    gate_up_bias, down_bias = experts.biases_or(hidden)
    shape = ExpertShape.of(experts, ids.shape[1], is_alone=order is None)
    for x, weight, scale, bias, output, each, is_gated in (
        (hidden, experts.gate_up, experts.gate_up_scale, gate_up_bias, between, tiles[0], True),
        (between, experts.down, experts.down_scale, down_bias, results, tiles[1], False),
    ):
        num_outputs = output.shape[1]
        num_tiles = num_pairs if order is None else num_pairs // each.tokens + num_experts
        words, group = words_of(scale)
        launch = _launcher(num_outputs, x.shape[1], group, shape, each, is_gated, hidden.device)
        launch(
            (-(-num_outputs // (each.rows // (2 if is_gated else 1))), num_tiles, 1),
            described(weight, num_outputs, each.rows, each.columns), x, words, bias, pairs, starts,
            output, experts.alpha, experts.limit or 0.0,
        )  # fmt: skip
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Constants of both products of a layer's experts."""

    num_experts: int
    top_k: int
    has_bias: bool
    is_clamped: bool
    is_alone: bool

    @staticmethod
    def of(experts: ExpertWeights, top_k: int, *, is_alone: bool) -> "ExpertShape":
        """Returns the constants for some experts."""
        return ExpertShape(
            num_experts=len(experts.down), top_k=top_k, has_bias=experts.gate_up_bias is not None,
            is_clamped=experts.limit is not None, is_alone=is_alone,
        )  # fmt: skip


def words_of(scale: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """Returns scales as words, [E, words, rows, each], and how many columns share one.

    That is None for MXFP4; see models.ops.triton.moe.word_scales.
    """
    if scale.dtype == torch.uint8:
        return scale.view(torch.int32), None
    return scale, COLUMNS // scale.shape[-1]


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
    num_outputs: int,
    num_inputs: int,
    group: int | None,
    shape: ExpertShape,
    tiles: ExpertTiles,
    is_gated: bool,
    device: torch.device,
) -> Launch:
    return Launch(
        expert_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, GROUP=group,
        NUM_EXPERTS=shape.num_experts, TOP_K=shape.top_k, IS_GATED=is_gated,
        HAS_BIAS=shape.has_bias, IS_CLAMPED=shape.is_clamped, IS_ALONE=shape.is_alone,
        TOKENS=tiles.tokens, ROWS=tiles.rows, COLUMNS=tiles.columns, STAGES=tiles.num_stages,
        UNPACKED=tiles.num_unpacked, LAST_TOKENS=tiles.last_tokens,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
        BLOCK_E=triton.next_power_of_2(shape.num_experts), num_warps=tiles.num_warps,
        **launch_options(device),
    )  # fmt: skip
