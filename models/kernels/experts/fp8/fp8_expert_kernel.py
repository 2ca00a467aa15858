"""Products of FP8 experts on Hopper: one warp fetches, two groups of four warps multiply.

A tile is 128 rows of each half of an expert's matrix times up to TOKENS tokens that chose it; the
halves are gate and up, or those of the outputs. Tokens have rows in the order of experts, so that
the copy engine fetches all, weights, tokens and the tokens' scales, into a ring that goes on from
tile to tile. Each group has 64 rows of the tensor cores' left factor: of the weight, or of the
tokens if TOKEN_AXIS is 0; with 128 of them there are too few registers for their scales otherwise.
As in wide_fp8_linear the sum over each 128 inputs is scaled and added to the others by ordinary
arithmetic of one group while the other's product runs. Scales by row multiply the finished sums.
They are read by the warp that fetches: groups that read them had too few registers for their loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from models.kernels.experts.fp8.fp8_expert_results import finished, store, store_rounded
from models.kernels.experts.fp8.fp8_expert_tiles import OUTPUTS, count_tiles, fact, fetch
from models.kernels.experts.packed.expert_kernel import gated
from models.kernels.experts.token_tiles import after
from models.kernels.launching.dependent_launch import let_next_start, wait_for_previous
from models.kernels.launching.gluon_names import reinterpret
from models.kernels.products.fp8.fp8_operands import DEPTH, SCALE_LAYOUT
from models.kernels.products.gate import rounded_to
from models.kernels.tuning.tiles import GROUP_ROWS

_GROUP_ROWS = gl.constexpr(GROUP_ROWS)
"""Of the tensor cores' left factor, for each group."""


@gluon.jit
def _multiply_step(
    sums, left, right, scales, table, step, TOKEN_AXIS: gl.constexpr, BY_ROW: gl.constexpr
):
    """Adds the product of 128 inputs, with scales of tokens, and the step's of rows in blocks."""
    layout: gl.constexpr = sums.type.layout
    if not BY_ROW:
        scales *= table.index(step).load(scales.type.layout)
    none = gl.zeros(sums.shape, gl.float32, layout)
    product = warpgroup_mma(left, right.permute((1, 0)), none, use_acc=False)
    return sums + product * gl.expand_dims(scales, 1 - TOKEN_AXIS)


@gluon.jit
def _sum_tile(
    ring, slot, phase, tables, GROUP: gl.constexpr, STEPS: gl.constexpr,
    TOKEN_AXIS: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Returns a tile's sums of one group with the place in the ring.

    The second sums are those of up, if the tile has both halves. tables: scales of each half, one
    for each step, unless BY_ROW.
    """
    weights, xs, scales, full, empty = ring
    first_table, second_table = tables
    SLOTS: gl.constexpr = weights.shape[0]
    BOXES: gl.constexpr = xs.shape[0] // SLOTS
    TOKENS: gl.constexpr = xs.shape[1]
    HALVES: gl.constexpr = weights.shape[1]
    WIDTH: gl.constexpr = TOKENS if TOKEN_AXIS == 1 else OUTPUTS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    of_tokens: gl.constexpr = gl.SliceLayout(1 - TOKEN_AXIS, layout)
    first_table = reinterpret(first_table, gl.float32, [first_table.shape[0], 1], plain)
    second_table = reinterpret(second_table, gl.float32, [second_table.shape[0], 1], plain)
    first = gl.zeros([_GROUP_ROWS, WIDTH], gl.float32, layout)
    second = first
    for step in range(STEPS):
        mbarrier.wait(full.index(slot), phase)
        matrix = weights.index(slot).reshape([HALVES * OUTPUTS, DEPTH])
        box = slot * BOXES + GROUP * (BOXES - 1)
        token_scales = reinterpret(scales.index(box), gl.float32, [scales.shape[2]], plain)
        token_scales = token_scales.slice(0, TOKENS).load(of_tokens)
        if TOKEN_AXIS == 1:
            left, right = matrix.slice(GROUP * _GROUP_ROWS, _GROUP_ROWS), xs.index(box)
        else:
            left, right = xs.index(box), matrix.slice(0, OUTPUTS)
        first = _multiply_step(
            first, left, right, token_scales, first_table, step, TOKEN_AXIS, BY_ROW
        )
        if HALVES == 2:
            if TOKEN_AXIS == 1:
                left = matrix.slice(OUTPUTS + GROUP * _GROUP_ROWS, _GROUP_ROWS)
            else:
                right = matrix.slice(OUTPUTS, OUTPUTS)
            second = _multiply_step(
                second, left, right, token_scales, second_table, step, TOKEN_AXIS, BY_ROW
            )
        mbarrier.arrive(empty.index(slot))
        slot, phase = after(slot, phase, SLOTS)
    return first, second, slot, phase


@gluon.jit
def _skip_tile(ring, slot, phase, STEPS: gl.constexpr):
    """Gives a tile's slots back; returns the place in the ring."""
    weights, _xs, _scales, full, empty = ring
    for _ in range(STEPS):
        mbarrier.wait(full.index(slot), phase)
        mbarrier.arrive(empty.index(slot))
        slot, phase = after(slot, phase, weights.shape[0])
    return slot, phase


@gluon.jit
def _compute_tile(
    ring, slot, phase, tables, place, tile_pairs, operands, exchange, turn, scale_place,
    GROUP: gl.constexpr, STEPS: gl.constexpr, NUM_OUTPUTS: gl.constexpr, IS_GATED: gl.constexpr,
    IS_CLAMPED: gl.constexpr, HAS_BIAS: gl.constexpr, BY_ROW: gl.constexpr,
    TOKEN_AXIS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Computes and stores a group's part of a tile; returns the place in the ring."""
    _, bias_ptr, output_ptr, output_scale_ptr, alpha, limit = operands
    HALVES: gl.constexpr = ring[0].shape[1]
    first, second, slot, phase = _sum_tile(
        ring, slot, phase, tables, GROUP, STEPS, TOKEN_AXIS, BY_ROW
    )
    matrix_row, output, first_row, end = place
    first = finished(
        first, matrix_row + output, output, tables[0], bias_ptr, GROUP, NUM_OUTPUTS, TOKEN_AXIS,
        BY_ROW, HAS_BIAS,
    )  # fmt: skip
    if HALVES == 2:
        second = finished(
            second, matrix_row + NUM_OUTPUTS + output, output, tables[1], bias_ptr, GROUP,
            NUM_OUTPUTS, TOKEN_AXIS, BY_ROW, HAS_BIAS,
        )  # fmt: skip
    rows = (first_row, end)
    if IS_GATED:
        values = rounded_to(gated(first, second, alpha, limit, IS_CLAMPED), DTYPE)
        store_rounded(
            values, rows, output, output_ptr, output_scale_ptr + scale_place, exchange, turn,
            GROUP, NUM_OUTPUTS, TOKEN_AXIS,
        )  # fmt: skip
    else:
        width: gl.constexpr = HALVES * NUM_OUTPUTS
        of_tile = None
        if tile_pairs[0] is not None:
            of_tile = tile_pairs[0].index(turn)
            if TOKEN_AXIS == 0:
                of_tile = of_tile.slice(GROUP * _GROUP_ROWS, _GROUP_ROWS)
        store(first.to(DTYPE), rows, output, output_ptr, of_tile, NUM_OUTPUTS, width, TOKEN_AXIS)
        if HALVES == 2:
            output_ptr += NUM_OUTPUTS
            store(
                second.to(DTYPE), rows, output, output_ptr, of_tile, NUM_OUTPUTS, width, TOKEN_AXIS
            )
    return slot, phase


@gluon.jit
def _multiply(
    ring, notices, exchange, operands, num_rows, scale_stride, GROUP: gl.constexpr,
    STEPS: gl.constexpr, NUM_OUTPUTS: gl.constexpr, NUM_EXPERTS: gl.constexpr,
    BLOCK_E: gl.constexpr, ROW_TILES: gl.constexpr, IS_GATED: gl.constexpr,
    IS_ALONE: gl.constexpr, IS_CLAMPED: gl.constexpr, HAS_BIAS: gl.constexpr,
    BY_ROW: gl.constexpr, TOKEN_AXIS: gl.constexpr, DTYPE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes a group's part of the program's tiles."""
    facts, tables, tile_pairs, written, read = notices
    HALVES: gl.constexpr = ring[0].shape[1]
    TOKENS: gl.constexpr = ring[1].shape[0] // ring[0].shape[0] * ring[1].shape[1]
    wait_for_previous(DEPENDENT)
    num_tiles = count_tiles(
        operands[0], num_rows, NUM_EXPERTS, TOKENS, BLOCK_E, ROW_TILES, IS_ALONE
    )
    slot, phase, turn = 0, 0, 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        at = turn & 1
        mbarrier.wait(written.index(at), turn >> 1 & 1)
        matrix_row = fact(facts.index(at), 0).to(gl.int64) * (HALVES * NUM_OUTPUTS)
        first_row, end = fact(facts.index(at), 1), fact(facts.index(at), 2)
        row_tile = tile % ROW_TILES
        output = row_tile * OUTPUTS
        scale_place = row_tile.to(gl.int64) * scale_stride + fact(facts.index(at), 3)
        if TOKEN_AXIS == 1:
            output += GROUP * _GROUP_ROWS
        else:
            first_row += GROUP * _GROUP_ROWS
            scale_place += GROUP * _GROUP_ROWS
        of_tile = (tables.index(HALVES * at), tables.index(HALVES * at + HALVES - 1))
        place = (matrix_row, output, first_row, end)
        if TOKEN_AXIS == 1 or first_row < end:
            slot, phase = _compute_tile(
                ring, slot, phase, of_tile, place, tile_pairs, operands, exchange, at, scale_place,
                GROUP, STEPS, NUM_OUTPUTS, IS_GATED, IS_CLAMPED, HAS_BIAS, BY_ROW, TOKEN_AXIS,
                DTYPE,
            )  # fmt: skip
        else:
            slot, phase = _skip_tile(ring, slot, phase, STEPS)
        mbarrier.arrive(read.index(at))
        turn += 1  # noqa: SIM113  # Gluon has no enumerate


@gluon.jit(do_not_specialize=["num_rows", "scale_stride"])
def fp8_expert_kernel(
    x, x_scale, weight, scale_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr, output_scale_ptr,
    num_rows, scale_stride, alpha, limit,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, NUM_EXPERTS: gl.constexpr,
    HALVES: gl.constexpr, IS_GATED: gl.constexpr, IS_ALONE: gl.constexpr, IS_CLAMPED: gl.constexpr,
    HAS_BIAS: gl.constexpr, BY_ROW: gl.constexpr, TOKENS: gl.constexpr, TOKEN_AXIS: gl.constexpr,
    TABLE: gl.constexpr, SLOTS: gl.constexpr, BLOCK_E: gl.constexpr,
    DTYPE: gl.constexpr, GROUP_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes rounded inner features, or results by pair, of tokens in the order of their rows.

    x, x_scale: rows [num_rows, NUM_INPUTS] in FP8 and their scales of blocks, described.
    weight: [E * halves, NUM_OUTPUTS, NUM_INPUTS], described.
    pairs_ptr: the pair of each row; IS_ALONE: the expert of each row, which is its pair.
    The order of rows is older than the previous kernel.
    """
    let_next_start(DEPENDENT)
    STEPS: gl.constexpr = (NUM_INPUTS + DEPTH - 1) // DEPTH
    ROW_TILES: gl.constexpr = (NUM_OUTPUTS + OUTPUTS - 1) // OUTPUTS
    weights = gl.allocate_shared_memory(
        weight.dtype, [SLOTS, HALVES, OUTPUTS, DEPTH], weight.layout
    )
    BOXES: gl.constexpr = TOKENS // x.block_shape[0]
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS * BOXES, x.block_shape[0], DEPTH], x.layout)
    scales = gl.allocate_shared_memory(
        gl.float32, [SLOTS * BOXES, 1, x_scale.block_shape[1]], SCALE_LAYOUT
    )
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    facts = gl.allocate_shared_memory(gl.int32, [2, 32], flat)
    tables = gl.allocate_shared_memory(gl.float32, [2 * HALVES, TABLE], flat)
    tile_pairs = (None,)
    if not IS_GATED and not IS_ALONE:
        tile_pairs = (gl.allocate_shared_memory(gl.int32, [2, TOKENS], flat),)
    written = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(2):
        mbarrier.init(written.index(turn), count=1)
        mbarrier.init(read.index(turn), count=2)
    # An unused barrier's memory would serve as something else, which the hardware would overwrite.
    exchange = (None, None)
    if IS_GATED and TOKEN_AXIS == 1:
        amaxes = gl.allocate_shared_memory(gl.float32, [4, TOKENS], flat)
        known = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(known, count=2)
        exchange = (amaxes, known)
    fence_async_shared()
    ring = (weights, xs, scales, full, empty)
    notices = (facts, tables, tile_pairs, written, read)
    operands = (
        starts_ptr, bias_ptr, output_ptr, output_scale_ptr, alpha, limit,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (
                ring, notices, exchange, operands, num_rows, scale_stride, 0, STEPS, NUM_OUTPUTS,
                NUM_EXPERTS, BLOCK_E, ROW_TILES, IS_GATED, IS_ALONE, IS_CLAMPED, HAS_BIAS,
                BY_ROW, TOKEN_AXIS, DTYPE, DEPENDENT,
            )),
            (_multiply, (
                ring, notices, exchange, operands, num_rows, scale_stride, 1, STEPS, NUM_OUTPUTS,
                NUM_EXPERTS, BLOCK_E, ROW_TILES, IS_GATED, IS_ALONE, IS_CLAMPED, HAS_BIAS,
                BY_ROW, TOKEN_AXIS, DTYPE, DEPENDENT,
            )),
            (fetch, (
                x, x_scale, weight, ring, notices, scale_ptr, pairs_ptr, starts_ptr, num_rows,
                STEPS, NUM_OUTPUTS, NUM_EXPERTS, BLOCK_E, ROW_TILES, IS_ALONE, BY_ROW, DEPENDENT,
            )),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
