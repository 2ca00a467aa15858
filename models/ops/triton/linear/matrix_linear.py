"""Products of few tokens on the tensor cores.

Such a product takes as long as reading its weight. The copy engine fills a ring of tiles: with
weights before the previous kernel has ended, with inputs after. Nothing passes through registers,
so all of shared memory can be loading.
"""

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.ops.triton.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.ops.triton.launching.launch import Launch
from models.ops.triton.linear.linear_configurations import MatrixTiles

_NUM_WARPS = gl.constexpr(4)
"""A warp group, which multiplies together."""
_LAYOUTS = {
    rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
    for rank in (2, 3)
}
"""Layouts of tiles in shared memory, by number of dimensions."""


@gluon.jit
def _fetch_weights(weight, tile, ready, row, column, NUM_BYTES: gl.constexpr, is_wanted):
    """Loads a tile of the weight; `ready` will receive NUM_BYTES, including those of inputs."""
    mbarrier.expect(ready, NUM_BYTES, pred=is_wanted)
    tma.async_copy_global_to_shared(weight, [0, row, column], ready, tile, pred=is_wanted)


@gluon.jit
def _fetch_inputs(x, tile, ready, column, is_wanted):
    tma.async_copy_global_to_shared(x, [0, column], ready, tile, pred=is_wanted)


@gluon.jit
def _gate_halves(sums, layout: gl.constexpr, IS_GATED: gl.constexpr):
    """Returns silu(first half of the rows) * second half if IS_GATED, in another layout."""
    if IS_GATED:
        ROWS: gl.constexpr = sums.shape[0] // 2
        pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, _NUM_WARPS, 1], [2, 0, 1])
        halves = sums.reshape([2, ROWS, sums.shape[1]]).permute((1, 2, 0))
        gate, up = gl.split(gl.convert_layout(halves, pairs))
        sums = gate / (1.0 + gl.exp(-gate)) * up
    return gl.convert_layout(sums, layout)


@gluon.jit
def _store(
    sums, bias_ptr, output_ptr, row, split, num_tokens,
    NUM_OUTPUTS: gl.constexpr, HAS_BIAS: gl.constexpr, IS_GATED: gl.constexpr,
):  # fmt: skip
    """Stores the outputs from `row` on, or this split's part of them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, _NUM_WARPS], [0, 1])
    outputs = _gate_halves(sums, layout, IS_GATED)
    rows = row + gl.arange(0, outputs.shape[0], gl.SliceLayout(1, layout))
    tokens = gl.arange(0, outputs.shape[1], gl.SliceLayout(0, layout))
    is_row = rows < NUM_OUTPUTS
    is_stored = is_row[:, None] & (tokens < num_tokens)[None, :]
    at_output = tokens[None, :] * NUM_OUTPUTS + rows[:, None]
    if HAS_BIAS:
        # Only one part of the sum includes the bias.
        bias = gl.load(bias_ptr + rows, mask=is_row & (split == 0), other=0.0)
        outputs += bias.to(gl.float32)[:, None]
    output_ptr += split * num_tokens * NUM_OUTPUTS
    gl.store(output_ptr + at_output, outputs.to(output_ptr.dtype.element_ty), mask=is_stored)


@gluon.jit(do_not_specialize=["num_tokens"])
def _matrix_kernel(
    x, weight, bias_ptr, output_ptr, num_tokens,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, TOKENS: gl.constexpr,
    HAS_BIAS: gl.constexpr, IS_GATED: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows of the weight with up to TOKENS tokens; sums are [rows, tokens].

    With SPLITS each program sums over its part of the inputs and stores that. Loads past the end of
    a matrix give zeros.
    """
    let_next_start(DEPENDENT)
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    OUTPUTS: gl.constexpr = ROWS // HALVES
    # Whole tiles, equally many for each part but the last.
    STEPS: gl.constexpr = (NUM_INPUTS + SPLITS * COLUMNS - 1) // (SPLITS * COLUMNS)
    NUM_BYTES: gl.constexpr = (ROWS + TOKENS) * COLUMNS * 2
    row = gl.program_id(0) * OUTPUTS
    split = gl.program_id(1)
    first = split * STEPS * COLUMNS
    weights = gl.allocate_shared_memory(
        weight.dtype, [STAGES, HALVES, OUTPUTS, COLUMNS], weight.layout
    )
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, COLUMNS], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        _fetch_weights(
            weight, weights.index(stage), ready.index(stage), row, first + stage * COLUMNS,
            NUM_BYTES, stage < STEPS,
        )  # fmt: skip
    wait_for_previous(DEPENDENT)
    for stage in gl.static_range(STAGES):
        _fetch_inputs(
            x, inputs.index(stage), ready.index(stage), first + stage * COLUMNS, stage < STEPS
        )
    on_cores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[_NUM_WARPS, 1], instr_shape=[16, TOKENS, 16]
    )
    sums = gl.zeros([ROWS, TOKENS], gl.float32, on_cores)
    stage = 0
    phase = 0
    for step in range(STEPS):
        mbarrier.wait(ready.index(stage), phase)
        tile = weights.index(stage).reshape([ROWS, COLUMNS])
        sums = warpgroup_mma(tile, inputs.index(stage).permute((1, 0)), sums)
        column = first + (step + STAGES) * COLUMNS
        is_wanted = step + STAGES < STEPS
        _fetch_weights(
            weight, weights.index(stage), ready.index(stage), row, column, NUM_BYTES, is_wanted
        )
        _fetch_inputs(x, inputs.index(stage), ready.index(stage), column, is_wanted)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    _store(
        sums, bias_ptr, output_ptr, row, split, num_tokens, NUM_OUTPUTS, HAS_BIAS, IS_GATED
    )  # fmt: skip


def matrix_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: MatrixTiles,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """Computes models.ops.linear.linear.linear for up to tiles.tokens tokens.

    x [T, K] and weight are contiguous, with 2-byte elements and K a multiple of 8. A gated product
    has neither bias nor splits.

    Returns:
        [T, N]; with tiles.splits > 1 its addends, [splits, T, N] float32.
    """
    num_tokens, num_inputs = x.shape
    halves = 2 if is_gated else 1
    num_outputs = weight.shape[0] // halves
    if tiles.splits == 1:
        output = x.new_empty(num_tokens, num_outputs)
    else:
        output = x.new_empty(tiles.splits, num_tokens, num_outputs, dtype=torch.float32)
    rows = tiles.rows // halves
    launch = _launcher(num_outputs, num_inputs, bias is not None, is_gated, tiles, x.device)
    launch(
        (-(-num_outputs // rows), tiles.splits, 1),
        _described(x, (num_tokens, num_inputs), (tiles.tokens, tiles.columns)),
        _described(weight, (halves, num_outputs, num_inputs), (halves, rows, tiles.columns)),
        weight if bias is None else bias, output, num_tokens,
    )  # fmt: skip
    return output


def _described(x: torch.Tensor, shape: tuple[int, ...], tile: tuple[int, ...]) -> TensorDescriptor:
    """Describes a contiguous tensor, viewed as `shape` and cut in tiles, to the copy engine."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, size * strides[0])
    return TensorDescriptor(x, list(shape), strides, list(tile), _LAYOUTS[len(shape)])


@lru_cache
def _launcher(
    num_outputs: int,
    num_inputs: int,
    has_bias: bool,
    is_gated: bool,
    tiles: MatrixTiles,
    device: torch.device,
) -> Launch:
    return Launch(
        _matrix_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, TOKENS=tiles.tokens,
        HAS_BIAS=has_bias, IS_GATED=is_gated, ROWS=tiles.rows, COLUMNS=tiles.columns,
        SPLITS=tiles.splits, STAGES=tiles.num_stages, num_warps=_NUM_WARPS.value,
        **launch_options(device),
    )  # fmt: skip
