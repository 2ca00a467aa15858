"""Products of few tokens on the tensor cores.

Such a product takes as long as reading its weight, so what counts is that the memory never rests.
The copy engine fills a ring of tiles: with weights before the previous kernel has ended, with
inputs after that. Nothing passes through registers, so as much is on its way as shared memory
holds.
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

from models.ops.input_norm import InputNorm
from models.ops.triton.dependent_launch import launch_options, let_next_start, wait_for_previous
from models.ops.triton.launch import Launch
from models.ops.triton.linear_configurations import MatrixTiles

_NUM_WARPS = gl.constexpr(4)
"""A warp group, which multiplies together."""
_LAYOUTS = {
    rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
    for rank in (2, 3)
}
"""How tiles lie in shared memory, by their number of dimensions."""


@gluon.jit
def _fetch_weights(weight, tile, ready, row, column, NUM_BYTES: gl.constexpr, is_wanted):
    """Has a tile of the weight copied; `ready` will have got NUM_BYTES, those of inputs too."""
    mbarrier.expect(ready, NUM_BYTES, pred=is_wanted)
    tma.async_copy_global_to_shared(weight, [0, row, column], ready, tile, pred=is_wanted)


@gluon.jit
def _fetch_inputs(x, tile, ready, column, is_wanted):
    """Has a tile of the inputs copied."""
    tma.async_copy_global_to_shared(x, [0, column], ready, tile, pred=is_wanted)


@gluon.jit
def _load_gain(gain_ptr, columns, NUM_INPUTS: gl.constexpr, HAS_NORM: gl.constexpr):
    """Reads the norm's gain of some inputs; without a norm anything will do."""
    gain = columns
    if HAS_NORM:
        gain = gl.load(gain_ptr + columns, mask=columns < NUM_INPUTS, other=0.0).to(gl.float32)
    return gain


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
    sums, bias_ptr, residual_ptr, output_ptr, row, split, num_tokens,
    NUM_OUTPUTS: gl.constexpr, HAS_BIAS: gl.constexpr, IS_GATED: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Stores the outputs from `row` on, or this part of them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, _NUM_WARPS], [0, 1])
    outputs = _gate_halves(sums, layout, IS_GATED)
    rows = row + gl.arange(0, outputs.shape[0], gl.SliceLayout(1, layout))
    tokens = gl.arange(0, outputs.shape[1], gl.SliceLayout(0, layout))
    is_row = rows < NUM_OUTPUTS
    is_stored = is_row[:, None] & (tokens < num_tokens)[None, :]
    at_output = tokens[None, :] * NUM_OUTPUTS + rows[:, None]
    if HAS_BIAS:
        # The bias belongs to one part of the sum.
        bias = gl.load(bias_ptr + rows, mask=is_row & (split == 0), other=0.0)
        outputs += bias.to(gl.float32)[:, None]
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + at_output, mask=is_stored, other=0.0)
        outputs += residual.to(gl.float32)
    output_ptr += split * num_tokens * NUM_OUTPUTS
    gl.store(output_ptr + at_output, outputs.to(output_ptr.dtype.element_ty), mask=is_stored)


@gluon.jit(do_not_specialize=["num_tokens"])
def _matrix_kernel(
    x, weight, bias_ptr, gain_ptr, residual_ptr, output_ptr, eps, num_tokens,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, TOKENS: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_NORM: gl.constexpr, IS_GATED: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows of the weight with up to TOKENS tokens; sums are [rows, tokens].

    With SPLITS each program sums over its part of the inputs, and stores that. Past its end a
    matrix is zero. The norm's gain joins each input, its scale the sum.
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
    by_token: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // COLUMNS, COLUMNS // 8], [_NUM_WARPS, 1], [1, 0]
    )
    columns = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, by_token))
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
    gain = _load_gain(gain_ptr, columns, NUM_INPUTS, HAS_NORM)
    wait_for_previous(DEPENDENT)
    for stage in gl.static_range(STAGES):
        _fetch_inputs(
            x, inputs.index(stage), ready.index(stage), first + stage * COLUMNS, stage < STEPS
        )
    on_cores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[_NUM_WARPS, 1], instr_shape=[16, TOKENS, 16]
    )
    sums = gl.zeros([ROWS, TOKENS], gl.float32, on_cores)
    if HAS_NORM:
        normed = gl.allocate_shared_memory(x.dtype, [TOKENS, COLUMNS], x.layout)
        squares = gl.zeros([TOKENS, COLUMNS], gl.float32, by_token)
    stage = 0
    phase = 0
    for step in range(STEPS):
        mbarrier.wait(ready.index(stage), phase)
        multiplied = inputs.index(stage)
        if HAS_NORM:
            entries = multiplied.load(by_token).to(gl.float32)
            squares += entries * entries
            multiplied = normed
            multiplied.store((entries * gain[None, :]).to(x.dtype))
            gain = _load_gain(gain_ptr, columns + (step + 1) * COLUMNS, NUM_INPUTS, HAS_NORM)
            fence_async_shared()
        tile = weights.index(stage).reshape([ROWS, COLUMNS])
        sums = warpgroup_mma(tile, multiplied.permute((1, 0)), sums)
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
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(squares, 1) / NUM_INPUTS + eps)
        sums *= gl.convert_layout(scale, gl.SliceLayout(0, on_cores))[None, :]
    _store(
        sums, bias_ptr, residual_ptr, output_ptr, row, split, num_tokens,
        NUM_OUTPUTS, HAS_BIAS, IS_GATED, HAS_RESIDUAL,
    )  # fmt: skip


def matrix_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: MatrixTiles,
    *,
    norm: InputNorm | None = None,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes what models.ops.linear.linear says for up to tiles.tokens tokens.

    Args:
        x: [T, K], contiguous, of two bytes a number; K is a multiple of 8.
        weight: [N, K], contiguous; [2 * N, K], gate before up, if is_gated.
        bias: [N] or None; None if is_gated.
        tiles: of a program.
        norm: applied to x first; not in splits, nor is what follows.
        is_gated: multiplies the SiLU of the first half of the outputs with the second.
        residual: [T, N], contiguous, added.

    Returns:
        [T, N]; with tiles.splits > 1 [splits, T, N] float32, which the product is the sum of.
    """
    num_tokens, num_inputs = x.shape
    halves = 2 if is_gated else 1
    num_outputs = weight.shape[0] // halves
    if tiles.splits == 1:
        output = x.new_empty(num_tokens, num_outputs)
    else:
        output = x.new_empty(tiles.splits, num_tokens, num_outputs, dtype=torch.float32)
    rows = tiles.rows // halves
    launch = _launcher(
        num_outputs, num_inputs, bias is not None, norm is not None, is_gated,
        residual is not None, tiles, x.device,
    )  # fmt: skip
    launch(
        (-(-num_outputs // rows), tiles.splits, 1),
        _described(x, (num_tokens, num_inputs), (tiles.tokens, tiles.columns)),
        _described(weight, (halves, num_outputs, num_inputs), (halves, rows, tiles.columns)),
        weight if bias is None else bias, weight if norm is None else norm.weight,
        weight if residual is None else residual, output, 0.0 if norm is None else norm.eps,
        num_tokens,
    )  # fmt: skip
    return output


def _described(x: torch.Tensor, shape: tuple[int, ...], tile: tuple[int, ...]) -> TensorDescriptor:
    """Returns what the copy engine takes: a contiguous tensor, seen in `shape`, cut in tiles."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, size * strides[0])
    return TensorDescriptor(x, list(shape), strides, list(tile), _LAYOUTS[len(shape)])


@lru_cache
def _launcher(
    num_outputs: int,
    num_inputs: int,
    has_bias: bool,
    has_norm: bool,
    is_gated: bool,
    has_residual: bool,
    tiles: MatrixTiles,
    device: torch.device,
) -> Launch:
    return Launch(
        _matrix_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, TOKENS=tiles.tokens,
        HAS_BIAS=has_bias, HAS_NORM=has_norm, IS_GATED=is_gated, HAS_RESIDUAL=has_residual,
        ROWS=tiles.rows, COLUMNS=tiles.columns, SPLITS=tiles.splits, STAGES=tiles.num_stages,
        num_warps=_NUM_WARPS.value, **launch_options(device),
    )  # fmt: skip
