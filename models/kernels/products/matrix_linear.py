"""Products of few tokens on the tensor cores.

Such a product takes as long as reading its weight. The copy engine fills a ring of tiles: with
weights before the previous kernel has ended, with inputs after. Nothing passes through registers,
so all of shared memory can be loading. Weights of 4 and 8 bits become bfloat16 on their way from
there to the tensor cores, through registers.
"""

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.kernels.launching.dependent_launch import (
    late_options,
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.gluon_names import load_box
from models.kernels.launching.launch import Launch
from models.kernels.products.gate import gated
from models.kernels.products.packed.matrix_weights import (
    finished,
    multiply,
    tile_scales,
)
from models.kernels.products.packed.packed_scales import scale_operand
from models.kernels.products.tile_order import first_token_of
from models.kernels.tuning.tiles import MatrixTiles

_NUM_WARPS = gl.constexpr(4)
"""A warp group, which multiplies together."""
_REGISTERS = {1: 0, 2: 232, 3: 160}
"""Registers of a thread by warp groups of a program; one group is not specialised."""
_LAYOUTS = {
    (rank, bytes_each): gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8 * bytes_each, rank=rank
    )
    for rank in (2, 3)
    for bytes_each in (1, 2)
}
"""Layouts of tiles in shared memory, by number of dimensions and bytes of an element."""


@gluon.jit
def _fetch_weights(weight, tile, ready, row, column, NUM_BYTES: gl.constexpr, is_wanted):
    """Loads a tile of the weight; `ready` will receive NUM_BYTES, including those of inputs."""
    mbarrier.expect(ready, NUM_BYTES, pred=is_wanted)
    if weight.dtype == gl.uint8:
        column = column // 2
    load_box(weight, [0, row, column], ready, tile, pred=is_wanted)


@gluon.jit
def _fetch_inputs(x, tile, ready, token, column, is_wanted):
    load_box(x, [token, column], ready, tile, pred=is_wanted)


@gluon.jit
def _gate_halves(
    sums, layout: gl.constexpr, dtype: gl.constexpr, IS_GATED: gl.constexpr, ROUNDS: gl.constexpr
):
    """Returns silu(first half of the rows) * second half if IS_GATED, in another layout."""
    if IS_GATED:
        ROWS: gl.constexpr = sums.shape[0] // 2
        pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, _NUM_WARPS, 1], [2, 0, 1])
        halves = sums.reshape([2, ROWS, sums.shape[1]]).permute((1, 2, 0))
        gate, up = gl.split(gl.convert_layout(halves, pairs))
        sums = gated(gate, up, dtype, ROUNDS)
    return gl.convert_layout(sums, layout)


@gluon.jit
def _store(
    sums, bias_ptr, output_ptr, row, token, split, num_tokens,
    NUM_OUTPUTS: gl.constexpr, HAS_BIAS: gl.constexpr, IS_GATED: gl.constexpr,
    ROUNDS: gl.constexpr,
):  # fmt: skip
    """Stores the outputs from `row` and `token` on, or this split's part of them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, _NUM_WARPS], [0, 1])
    dtype: gl.constexpr = output_ptr.dtype.element_ty
    outputs = _gate_halves(sums, layout, dtype, IS_GATED, ROUNDS)
    rows = row + gl.arange(0, outputs.shape[0], gl.SliceLayout(1, layout))
    each = gl.arange(0, outputs.shape[1], gl.SliceLayout(0, layout))
    is_row = rows < NUM_OUTPUTS
    is_stored = is_row[:, None] & (token + each < num_tokens)[None, :]
    at_output = each[None, :] * NUM_OUTPUTS + rows[:, None]
    if HAS_BIAS:
        # Only one part of the sum includes the bias.
        bias = gl.load(bias_ptr + rows, mask=is_row & (split == 0), other=0.0)
        outputs += bias.to(gl.float32)[:, None]
    # Batch-invariant products of many tokens have more than 2^31 outputs.
    output_ptr += (split * num_tokens + token).to(gl.int64) * NUM_OUTPUTS
    gl.store(output_ptr + at_output, outputs.to(dtype), mask=is_stored)


@gluon.jit
def _sum_tiles(
    factors, ring, scale_ptrs, place, layout: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, STEPS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Returns one warp group's sums [rows, tokens], alone in a tuple.

    The group multiplies every GROUPS-th tile and has slots of its own.
    """
    x, weight = factors
    row, token, first = place
    weights, inputs, ready = ring
    scale_ptr, zero_ptr = scale_ptrs
    STAGES: gl.constexpr = weights.shape[0] // GROUPS
    HALVES: gl.constexpr = weights.shape[1]
    ROWS: gl.constexpr = HALVES * weights.shape[2]
    WIDTH: gl.constexpr = weights.shape[3]
    TOKENS: gl.constexpr = inputs.shape[1]
    COLUMNS: gl.constexpr = inputs.shape[2]
    STRIDE: gl.constexpr = GROUPS * COLUMNS
    MY_STEPS: gl.constexpr = (STEPS - GROUP + GROUPS - 1) // GROUPS
    NUM_BYTES: gl.constexpr = (
        ROWS * WIDTH * (weight.dtype.primitive_bitwidth // 8) + TOKENS * COLUMNS * 2
    )
    NUM_BITS: gl.constexpr = WIDTH * 8 // COLUMNS
    first += GROUP * COLUMNS
    for stage in gl.static_range(STAGES):
        slot = GROUP * STAGES + stage
        _fetch_weights(
            weight, weights.index(slot), ready.index(slot), row, first + stage * STRIDE,
            NUM_BYTES, stage < MY_STEPS,
        )  # fmt: skip
    if scale_ptr is not None:
        scales = tile_scales(
            scale_ptr, zero_ptr, row, first, ROWS, COLUMNS, SCALE_COLUMNS, NUM_OUTPUTS,
            NUM_INPUTS, HALVES, NUM_BITS=NUM_BITS,
        )  # fmt: skip
    wait_for_previous(DEPENDENT)
    for stage in gl.static_range(STAGES):
        slot = GROUP * STAGES + stage
        _fetch_inputs(
            x,
            inputs.index(slot),
            ready.index(slot),
            token,
            first + stage * STRIDE,
            stage < MY_STEPS,
        )
    sums = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    stage = 0
    phase = 0
    for step in range(MY_STEPS):
        slot = GROUP * STAGES + stage
        mbarrier.wait(ready.index(slot), phase)
        tile = weights.index(slot).reshape([ROWS, WIDTH])
        if scale_ptr is None:
            sums = multiply(tile, inputs.index(slot), None, sums, layout)
        else:
            # The scales of the next step load during this one's product.
            next_scales = tile_scales(
                scale_ptr, zero_ptr, row, first + (step + 1) * STRIDE, ROWS, COLUMNS,
                SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, HALVES, NUM_BITS=NUM_BITS,
            )  # fmt: skip
            sums = multiply(tile, inputs.index(slot), scales, sums, layout)
            scales = next_scales
        column = first + (step + STAGES) * STRIDE
        is_wanted = step + STAGES < MY_STEPS
        _fetch_weights(
            weight, weights.index(slot), ready.index(slot), row, column, NUM_BYTES, is_wanted
        )
        _fetch_inputs(x, inputs.index(slot), ready.index(slot), token, column, is_wanted)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return (sums,)


@gluon.jit
def _leave_sums(
    factors, ring, scale_ptrs, place, layout: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, STEPS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, DEPENDENT: gl.constexpr, parts, done,
):  # fmt: skip
    """Leaves one warp group's sums in shared memory, to the first group."""
    (sums,) = _sum_tiles(
        factors, ring, scale_ptrs, place, layout, GROUP, GROUPS, STEPS, SCALE_COLUMNS,
        NUM_OUTPUTS, NUM_INPUTS, DEPENDENT,
    )  # fmt: skip
    parts.index(GROUP - 1).store(sums)
    mbarrier.arrive(done.index(GROUP - 1))


@gluon.jit(do_not_specialize=["num_tokens"])
def _matrix_kernel(
    x, weight, scale_ptr, zero_ptr, bias_ptr, output_ptr, num_tokens,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, TOKENS: gl.constexpr,
    HAS_BIAS: gl.constexpr, IS_GATED: gl.constexpr, ROUNDS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows of the weight with a tile of TOKENS tokens; sums are [rows, tokens].

    With SPLITS each program sums over its part of the inputs and stores that. With GROUPS each warp
    group of a program sums over its tiles, and their sums are added in order. Loads past the end of
    a matrix give zeros. A packed weight has scales, perhaps zeros, of SCALE_COLUMNS columns.
    Pointers to what a weight does not have are None.
    """
    let_next_start(DEPENDENT)
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    OUTPUTS: gl.constexpr = ROWS // HALVES
    # Whole tiles, equally many for each part but the last.
    STEPS: gl.constexpr = (NUM_INPUTS + SPLITS * COLUMNS - 1) // (SPLITS * COLUMNS)
    WIDTH: gl.constexpr = COLUMNS // 2 if weight.dtype == gl.uint8 else COLUMNS
    SLOTS: gl.constexpr = GROUPS * STAGES
    # Tiles of tokens that are multiplied with the same rows run at the same time.
    num_token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    row = gl.program_id(0) // num_token_tiles * OUTPUTS
    token = first_token_of(gl.program_id(0) % num_token_tiles, TOKENS, num_tokens)
    split = gl.program_id(1)
    place = (row, token, split * STEPS * COLUMNS)
    weights = gl.allocate_shared_memory(
        weight.dtype, [SLOTS, HALVES, OUTPUTS, WIDTH], weight.layout
    )
    inputs = gl.allocate_shared_memory(x.dtype, [SLOTS, TOKENS, COLUMNS], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
    on_cores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[_NUM_WARPS, 1], instr_shape=[16, TOKENS, 16]
    )
    factors = (x, weight)
    ring = (weights, inputs, ready)
    scale_ptrs = (scale_ptr, zero_ptr)
    if GROUPS == 1:
        fence_async_shared()
        (sums,) = _sum_tiles(
            factors, ring, scale_ptrs, place, on_cores, 0, 1, STEPS, SCALE_COLUMNS,
            NUM_OUTPUTS, NUM_INPUTS, DEPENDENT,
        )  # fmt: skip
    else:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
        parts = gl.allocate_shared_memory(gl.float32, [GROUPS - 1, ROWS, TOKENS], plain)
        done = gl.allocate_shared_memory(gl.int64, [GROUPS - 1, 1], mbarrier.MBarrierLayout())
        for group in gl.static_range(GROUPS - 1):
            mbarrier.init(done.index(group), count=1)
        fence_async_shared()
        if GROUPS == 2:
            (sums,) = gl.warp_specialize(
                [
                    (_sum_tiles, (
                        factors, ring, scale_ptrs, place, on_cores, 0, 2, STEPS,
                        SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT,
                    )),
                    (_leave_sums, (
                        factors, ring, scale_ptrs, place, on_cores, 1, 2, STEPS,
                        SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT, parts, done,
                    )),
                ],
                [_NUM_WARPS],
                [REGISTERS],
            )  # fmt: skip
        else:
            (sums,) = gl.warp_specialize(
                [
                    (_sum_tiles, (
                        factors, ring, scale_ptrs, place, on_cores, 0, 3, STEPS,
                        SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT,
                    )),
                    (_leave_sums, (
                        factors, ring, scale_ptrs, place, on_cores, 1, 3, STEPS,
                        SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT, parts, done,
                    )),
                    (_leave_sums, (
                        factors, ring, scale_ptrs, place, on_cores, 2, 3, STEPS,
                        SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT, parts, done,
                    )),
                ],
                [_NUM_WARPS, _NUM_WARPS],
                [REGISTERS, REGISTERS],
            )  # fmt: skip
        for group in gl.static_range(GROUPS - 1):
            mbarrier.wait(done.index(group), 0)
            sums += parts.index(group).load(on_cores)
    sums = finished(sums, scale_ptr)
    _store(
        sums, bias_ptr, output_ptr, row, token, split, num_tokens, NUM_OUTPUTS, HAS_BIAS, IS_GATED,
        ROUNDS,
    )  # fmt: skip


def matrix_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: MatrixTiles,
    *,
    weight_scale: torch.Tensor | None = None,
    weight_zero: torch.Tensor | None = None,
    is_gated: bool = False,
    rounds: bool = False,
    is_late: bool = False,
) -> torch.Tensor:
    """Computes models.ops.products.linear.linear, reading the weight for each tiles.tokens tokens.

    x [T, K] and weight are contiguous, with 2-byte elements and K a multiple of 8. A gated product
    has neither bias nor splits. For a weight of 4 or 8 bits in kernel order (see
    models.operands.packed_weights), with its weight_scale and weight_zero, x is
    bfloat16, K a multiple of 32, and tiles have 256 columns or, of 8 bits, 128.

    rounds: a gated product is rounded before the gate, like two operators.
    is_late: see LATE of dependent_launch; not with groups.

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
    scale_columns, per_byte = 0, num_inputs // weight.shape[1]
    if weight_scale is not None:
        scale_columns, weight_scale = scale_operand(weight, weight_scale)
    launch = _launcher(
        num_outputs, num_inputs, bias is not None, is_gated, rounds, scale_columns, tiles, x.device,
        is_late=is_late,
    )  # fmt: skip
    columns = tiles.columns // per_byte
    launch(
        (-(-num_outputs // rows) * -(-num_tokens // tiles.tokens), tiles.splits, 1),
        _described(x, (num_tokens, num_inputs), (tiles.tokens, tiles.columns)),
        _described(weight, (halves, num_outputs, weight.shape[1]), (halves, rows, columns)),
        weight_scale, weight_zero, weight if bias is None else bias, output, num_tokens,
    )  # fmt: skip
    return output


def _described(x: torch.Tensor, shape: tuple[int, ...], tile: tuple[int, ...]) -> TensorDescriptor:
    """Describes a contiguous tensor, viewed as `shape` and cut in tiles, to the copy engine."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, size * strides[0])
    layout = _LAYOUTS[len(shape), x.element_size()]
    return TensorDescriptor(x, list(shape), strides, list(tile), layout)


@lru_cache
def _launcher(
    num_outputs: int,
    num_inputs: int,
    has_bias: bool,
    is_gated: bool,
    rounds: bool,
    scale_columns: int,
    tiles: MatrixTiles,
    device: torch.device,
    *,
    is_late: bool,
) -> Launch:
    return Launch(
        _matrix_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, TOKENS=tiles.tokens,
        HAS_BIAS=has_bias, IS_GATED=is_gated, ROUNDS=rounds, SCALE_COLUMNS=scale_columns,
        ROWS=tiles.rows, COLUMNS=tiles.columns, SPLITS=tiles.splits, STAGES=tiles.num_stages,
        GROUPS=tiles.groups, REGISTERS=_REGISTERS[tiles.groups], num_warps=_NUM_WARPS.value,
        **(late_options if is_late else launch_options)(device),
    )  # fmt: skip
