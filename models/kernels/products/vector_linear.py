"""Products of one or two tokens as sums of scalar products.

Such a product takes as long as reading its weight. A program takes some rows of the weight and all
tokens. FP8 weights become float32 in registers, and nothing is rounded to FP8.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import (
    late_options,
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.tuning.tiles import VectorTiles
from models.operands.weight_scales import is_by_block


@triton.jit
def _load_columns(ptrs, columns, START: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Reads the tile of columns from START of a weight; columns past its end are zero."""
    if START + COLUMNS <= SIZE:
        tile = tl.load(ptrs + START, eviction_policy="evict_first")
    else:
        is_column = START + columns < SIZE
        tile = tl.load(ptrs + START, mask=is_column, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _sum_octets(x):
    """Sums runs of eight along the last dimension; a thread holds the eight that it loaded."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 8, 8)), 3)


@triton.jit
def _scale_blocks(sums, scales, step, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Scales a tile's sums of eights, [rows, tokens, columns / 8], by blocks of 128 columns.

    scales points at those of the rows' block, which all rows of a program share.
    """
    BLOCKS: tl.constexpr = COLUMNS // 128
    blocks = step * BLOCKS + tl.arange(0, BLOCKS)
    # So few that they take the layout of the sums: no thread passes its sums to another.
    scale = tl.load(scales + blocks, mask=blocks * 128 < SIZE, other=0.0)
    scaled = tl.reshape(sums, (sums.shape[0], sums.shape[1], BLOCKS, 16)) * scale[:, None]
    return tl.reshape(scaled, sums.shape)


@triton.jit
def _gate(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _vector_kernel(  # noqa: C901, PLR0912, PLR0915  # constants choose the branches
    x_ptr, weight_ptr, scale_ptr, bias_ptr, gain_ptr, residual_ptr, output_ptr, eps,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_BLOCKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes ROWS outputs of each token with scalar products; tiles are [rows, tokens, columns].

    The norm's gain multiplies each input, its scale the sum: the sum of squares is ready only then.
    scale_ptr, unless None, is a weight's scales: of rows, or of blocks if IS_BLOCKED.
    """
    let_next_start(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < NUM_OUTPUTS
    tokens = tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)[None, None, :]
    read_rows = rows
    if NUM_OUTPUTS % ROWS != 0:
        # Rows past the end read the last one again, which needs no mask.
        read_rows = tl.minimum(rows, NUM_OUTPUTS - 1)
    weight_ptrs = weight_ptr + read_rows[:, None, None] * NUM_INPUTS + columns
    if scale_ptr is not None:
        # A thread reads eight elements of a row, as of the inputs: sixteen would have to pass
        # through shared memory to meet them.
        weight_ptrs = tl.max_contiguous(weight_ptrs, [1, 1, 8])
    up_ptrs = weight_ptrs + NUM_OUTPUTS * NUM_INPUTS
    x_ptrs = x_ptr + tokens[None, :, None] * NUM_INPUTS + columns
    # No kernel writes weights: the first tile loads before the inputs are ready.
    weight = _load_columns(weight_ptrs, columns, 0, NUM_INPUTS, COLUMNS)
    up = weight
    if IS_GATED:
        up = _load_columns(up_ptrs, columns, 0, NUM_INPUTS, COLUMNS)
    row_scale = 1.0
    up_row_scale = 1.0
    scales = scale_ptr
    up_scales = scale_ptr
    if scale_ptr is not None:
        if IS_BLOCKED:
            NUM_BLOCKS: tl.constexpr = (NUM_INPUTS + 127) // 128
            scales += tl.program_id(0) * ROWS // 128 * NUM_BLOCKS
            up_scales = scales + NUM_OUTPUTS // 128 * NUM_BLOCKS
        else:
            row_scale = tl.load(scale_ptr + read_rows)[:, None]
            if IS_GATED:
                up_row_scale = tl.load(scale_ptr + NUM_OUTPUTS + read_rows)[:, None]
    wait_for_previous(DEPENDENT)
    at_output = tokens[None, :] * NUM_OUTPUTS + rows[:, None]
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at_output, mask=is_row[:, None], other=0.0)
        residual = residual.to(tl.float32)
    sums = tl.zeros([ROWS, TOKENS, COLUMNS // 8], tl.float32)
    up_sums = sums
    squares = tl.zeros([1, TOKENS, COLUMNS // 8], tl.float32)
    for step in tl.static_range((NUM_INPUTS + COLUMNS - 1) // COLUMNS):
        next_weight = weight
        next_up = up
        if (step + 1) * COLUMNS < NUM_INPUTS:
            # The next tile loads while this one is multiplied.
            next_weight = _load_columns(
                weight_ptrs, columns, (step + 1) * COLUMNS, NUM_INPUTS, COLUMNS
            )
            if IS_GATED:
                next_up = _load_columns(up_ptrs, columns, (step + 1) * COLUMNS, NUM_INPUTS, COLUMNS)
        is_column = step * COLUMNS + columns < NUM_INPUTS
        x = tl.load(x_ptrs + step * COLUMNS, mask=is_column, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += _sum_octets(x * x)
            gain = tl.load(gain_ptr + step * COLUMNS + columns, mask=is_column, other=0.0)
            x *= gain.to(tl.float32)
        octets = _sum_octets(weight.to(tl.float32) * x)
        if IS_BLOCKED:
            octets = _scale_blocks(octets, scales, step, NUM_INPUTS, COLUMNS)
        sums += octets
        if IS_GATED:
            octets = _sum_octets(up.to(tl.float32) * x)
            if IS_BLOCKED:
                octets = _scale_blocks(octets, up_scales, step, NUM_INPUTS, COLUMNS)
            up_sums += octets
        weight = next_weight
        up = next_up
    outputs = tl.sum(sums, 2)
    if scale_ptr is not None:
        outputs *= row_scale
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 2) / NUM_INPUTS + eps)
        outputs *= scale
    if HAS_BIAS:
        outputs += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        up_outputs = tl.sum(up_sums, 2) * scale
        if scale_ptr is not None:
            up_outputs *= up_row_scale
        outputs = _gate(outputs, up_outputs)
    if HAS_RESIDUAL:
        outputs += residual
    tl.store(output_ptr + at_output, outputs.to(output_ptr.dtype.element_ty), mask=is_row[:, None])


def vector_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: VectorTiles,
    *,
    weight_scale: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    is_late: bool = False,
) -> torch.Tensor:
    """Computes models.ops.products.linear.linear in one kernel that rounds once, [T, N].

    Applies the norm of norm_weight [K] and eps to x first and adds the residual [T, N] last. All
    tensors are contiguous; T is a power of two, and every token costs registers. A gated product
    has no bias. The output may be the residual, whose elements only the program that writes them
    reads, but not x, which every program reads. An FP8 weight has a weight_scale, by row or by
    block (see models.ops.products.linear); with blocks tiles have at least 128 columns and up to
    128 rows, and N of a gated product is a multiple of 128. is_late: see LATE of dependent_launch.
    """
    num_tokens, num_inputs = x.shape
    num_outputs = weight.shape[0] // (2 if is_gated else 1)
    if output is None:
        output = x.new_empty(num_tokens, num_outputs)
    launch = _launcher(
        num_outputs, num_inputs, num_tokens, bias is not None, norm_weight is not None, is_gated,
        residual is not None, is_by_block(weight, weight_scale), tiles, x.device,
        is_late=is_late,
    )  # fmt: skip
    launch(
        (-(-num_outputs // tiles.rows), 1, 1),
        x, weight, weight_scale, weight if bias is None else bias,
        weight if norm_weight is None else norm_weight,
        weight if residual is None else residual, output, eps,
    )  # fmt: skip
    return output


@lru_cache
def _launcher(
    num_outputs: int,
    num_inputs: int,
    num_tokens: int,
    has_bias: bool,
    has_norm: bool,
    is_gated: bool,
    has_residual: bool,
    is_blocked: bool,
    tiles: VectorTiles,
    device: torch.device,
    *,
    is_late: bool,
) -> Launch:
    return Launch(
        _vector_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, TOKENS=num_tokens,
        HAS_BIAS=has_bias, HAS_NORM=has_norm, IS_GATED=is_gated, HAS_RESIDUAL=has_residual,
        IS_BLOCKED=is_blocked, ROWS=tiles.rows, COLUMNS=tiles.columns, num_warps=tiles.num_warps,
        **(late_options if is_late else launch_options)(device),
    )  # fmt: skip
