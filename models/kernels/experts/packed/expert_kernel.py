"""Experts of 4 bits on Hopper's tensor cores: weights are the left factor, from registers.

A program multiplies a tile of rows of one expert's matrix with a tile of tokens that chose it. The
copy engine fills a ring of weights, asynchronous copies one of inputs, whose rows may be anywhere.
Weights become bfloat16 on their way to the tensor cores, which multiply the tile before meanwhile
where that pays.
Every sum goes over the inputs in order, whatever the tiles: bits do not depend on the batch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from models.kernels.experts.packed.word_scales import (
    are_floats,
    columns_of_word,
    scales_of,
    tile_layout,
    words_of_columns,
    words_of_row,
)
from models.kernels.launching.dependent_launch import let_next_start, wait_for_previous
from models.kernels.launching.gluon_names import barrier, load_box, load_elements
from models.kernels.products.packed.matrix_weights import finished, unpacked

OCTET = gl.constexpr(8)
"""Rows of a tensor core's left factor that one register of a warp belongs to."""


@gluon.jit
def _find_rows(
    tile, pairs_ptr, starts_ptr, layout: gl.constexpr, NUM_EXPERTS: gl.constexpr,
    TOKENS: gl.constexpr, BLOCK_E: gl.constexpr, IS_ALONE: gl.constexpr,
):  # fmt: skip
    """Returns a tile's expert, its first row, and the end; see moe_grouped.find_rows."""
    if IS_ALONE:
        expert = gl.load(pairs_ptr + tile)
        first_row = tile
        end = gl.where(expert < NUM_EXPERTS, tile + 1, tile)
    else:
        experts = gl.arange(0, BLOCK_E, layout)
        is_expert = experts < NUM_EXPERTS
        starts = gl.load(starts_ptr + experts, mask=is_expert, other=0)
        ends = gl.load(starts_ptr + experts + 1, mask=is_expert, other=0)
        is_before = is_expert & (starts // TOKENS + experts <= tile)
        expert = gl.sum(is_before.to(gl.int32), 0) - 1
        is_own = experts == expert
        start = gl.sum(gl.where(is_own, starts, 0), 0)
        end = gl.sum(gl.where(is_own, ends, 0), 0)
        first_row = start + (tile - start // TOKENS - expert) * TOKENS
    return expert, first_row, end


@gluon.jit
def gated(gate, up, alpha, limit, IS_CLAMPED: gl.constexpr):
    """Computes models.ops.experts.moe.gated of float32 gate and up."""
    if IS_CLAMPED:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        if IS_CLAMPED == 1:
            up = up + 1.0
        return gate / (1.0 + gl.exp(-alpha * gate)) * up
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _gate_and_up(sums):
    """Returns the sums of gate and up: every other eight rows of a tile, [rows / 2, tokens]."""
    PAIRS: gl.constexpr = sums.shape[0] // 16
    TOKENS: gl.constexpr = sums.shape[1]
    gate, up = gl.split(sums.reshape([PAIRS, 2, OCTET, TOKENS]).permute((0, 2, 3, 1)))
    return gate.reshape([PAIRS * OCTET, TOKENS]), up.reshape([PAIRS * OCTET, TOKENS])


@gluon.jit
def _add_bias(sums, bias_ptr, row, NUM_OUTPUTS: gl.constexpr):
    rows = row + gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
    bias = gl.load(bias_ptr + rows, mask=rows < NUM_OUTPUTS, other=0.0)
    return sums + bias.to(gl.float32)[:, None]


@gluon.jit
def results_of(
    sums, bias_ptr, row, alpha, limit, NUM_OUTPUTS: gl.constexpr, HAS_BIAS: gl.constexpr,
    IS_GATED: gl.constexpr, IS_CLAMPED: gl.constexpr,
):  # fmt: skip
    """Returns sums with their bias, gated if IS_GATED."""
    if IS_GATED:
        gate, up = _gate_and_up(sums)
        if HAS_BIAS:
            gate = _add_bias(gate, bias_ptr, row, NUM_OUTPUTS)
            up = _add_bias(up, bias_ptr + NUM_OUTPUTS, row, NUM_OUTPUTS)
        return gated(gate, up, alpha, limit, IS_CLAMPED)
    else:  # noqa: RET505  # one branch is compiled
        if HAS_BIAS:
            sums = _add_bias(sums, bias_ptr, row, NUM_OUTPUTS)
        return sums


@gluon.jit
def store_results(
    sums, pairs_ptr, output_ptr, row, first_row, end, NUM_OUTPUTS: gl.constexpr,
    IS_BY_PAIR: gl.constexpr,
):  # fmt: skip
    """Stores outputs from `row` on, [rows, tokens], by sorted row or by pair."""
    ROWS: gl.constexpr = sums.shape[0]
    NUM_WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = min(32, ROWS // 8)
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, NUM_WARPS], [0, 1])
    outputs = gl.convert_layout(sums.to(output_ptr.dtype.element_ty), layout)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    places = first_row + gl.arange(0, outputs.shape[1], gl.SliceLayout(0, layout))
    is_place = places < end
    if IS_BY_PAIR:
        places = gl.load(pairs_ptr + places, mask=is_place, other=0)
    at = places.to(gl.int64)[None, :] * NUM_OUTPUTS + rows[:, None]
    gl.store(output_ptr + at, outputs, mask=(rows < NUM_OUTPUTS)[:, None] & is_place[None, :])


@gluon.jit
def _scale_rows(
    scale_ptr, expert, row, ROWS: gl.constexpr, COLUMNS: gl.constexpr, NUM_ROWS: gl.constexpr,
    NUM_INPUTS: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Returns where a tile's first words of scales are, [ROWS, words].

    row: of the matrix, gate and up in turns; rows past the end have the scales of the last one.
    With two PARTS it is of gate before up, whose scales take turns.
    """
    EACH: gl.constexpr = words_of_columns(128, GROUP)
    layout: gl.constexpr = tile_layout(ROWS, COLUMNS, gl.num_warps(), GROUP)
    rows = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), NUM_ROWS - 1)
    if PARTS > 1:
        part, own = rows // (NUM_ROWS // PARTS), rows % (NUM_ROWS // PARTS)
        rows = (own // OCTET * PARTS + part) * OCTET + own % OCTET
    words = gl.arange(0, words_of_columns(COLUMNS, GROUP), gl.SliceLayout(0, layout))
    scale_ptr += expert.to(gl.int64) * (words_of_row(NUM_INPUTS) * NUM_ROWS * EACH)
    scale_ptrs = scale_ptr + rows[:, None] * EACH
    return scale_ptrs + (words // EACH * (NUM_ROWS * EACH) + words % EACH)[None, :]


@gluon.jit
def _load_scales(
    scale_rows, step, COLUMNS: gl.constexpr, NUM_ROWS: gl.constexpr, NUM_INPUTS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Loads the words of scales that a step has, maybe with others; word_scales takes them."""
    EACH: gl.constexpr = words_of_columns(128, GROUP)
    # Steps past the end have any scales: their inputs are zero.
    last: gl.constexpr = words_of_row(NUM_INPUTS) - max(1, COLUMNS // 128)
    word = gl.minimum(step * COLUMNS // 128, last) * (NUM_ROWS * EACH)
    if scale_rows.shape[1] < EACH:
        word += step * COLUMNS % 128 // columns_of_word(GROUP)
    return gl.load(scale_rows + word)


@gluon.jit
def _fetch_weights(weight, place, tile, ready, column, NUM_BYTES: gl.constexpr, is_wanted):
    """Loads a tile of octets of rows; coordinates are the expert, octet, half, row and byte."""
    expert, octet = place
    mbarrier.expect(ready, NUM_BYTES, pred=is_wanted)
    load_box(weight, [expert, octet, 0, 0, column // 2], ready, tile, pred=is_wanted)


@gluon.jit
def fetch_inputs(x_rows, is_row, tile, column, layout: gl.constexpr, SIZE: gl.constexpr):
    """Loads columns of gathered rows, zeros past the end; the caller's group counts them."""
    columns = column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    is_inside = is_row[:, None] & (columns < SIZE)[None, :]
    load_elements(tile, x_rows[:, None] + columns[None, :], is_inside)
    async_copy.commit_group()


@gluon.jit
def _multiply(
    step, sums, scales, stage, phase, weight, place, x_rows, is_row, scale_rows, ring,
    x_layout: gl.constexpr, NUM_ROWS: gl.constexpr, NUM_INPUTS: gl.constexpr,
    GROUP: gl.constexpr, UNPACKED: gl.constexpr,
):  # fmt: skip
    """Begins a tile's product, ends the one before and fills its slot again.

    The tensor cores read unpacked weights from registers until a product ends, and only code, not
    the compiler, keeps these from being written sooner: with one tile UNPACKED, its own product
    ends here too; with two, the caller unrolls two steps, whose registers differ.

    Returns the sums, the scales of the next tile, and its stage and phase.
    """
    weights, inputs, ready = ring
    STAGES: gl.constexpr = weights.shape[0]
    AHEAD: gl.constexpr = STAGES - 1
    COLUMNS: gl.constexpr = inputs.shape[2]
    STEPS: gl.constexpr = (NUM_INPUTS + COLUMNS - 1) // COLUMNS
    ROWS: gl.constexpr = sums.shape[0]
    layout: gl.constexpr = sums.type.layout
    mbarrier.wait(ready.index(stage), phase)
    async_copy.wait_group(AHEAD - 1)
    fence_async_shared()
    # The scales of the next step load during this one's product.
    next_scales = _load_scales(scale_rows, step + 1, COLUMNS, NUM_ROWS, NUM_INPUTS, GROUP)
    pairs = scales_of(scales, step, COLUMNS, GROUP)
    tile = weights.index(stage).reshape([ROWS, COLUMNS // 2])
    left = unpacked(tile, pairs, layout)
    sums = warpgroup_mma(left, inputs.index(stage).permute((1, 0)), sums, is_async=True)
    sums = warpgroup_mma_wait(UNPACKED - 1, deps=[sums])
    # The step before has ended its product in all warps, so its slot is free.
    barrier()
    before = gl.where(stage == 0, AHEAD, stage - 1)
    column = (step + AHEAD) * COLUMNS
    _fetch_weights(
        weight, place, weights.index(before), ready.index(before), column, ROWS * COLUMNS // 2,
        step + AHEAD < STEPS,
    )  # fmt: skip
    fetch_inputs(x_rows, is_row, inputs.index(before), column, x_layout, NUM_INPUTS)
    is_last = stage == AHEAD
    return sums, next_scales, gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def _sum_tiles(
    weight, place, x_rows, is_row, scale_rows, scales, ring, x_layout: gl.constexpr,
    NUM_ROWS: gl.constexpr, NUM_INPUTS: gl.constexpr, GROUP: gl.constexpr, UNPACKED: gl.constexpr,
):  # fmt: skip
    """Returns a tile's sums [rows, tokens]; loads of all stages but the last have begun.

    scale_rows: where words of scales are; scales: those of the first tile.
    """
    weights, inputs, _ready = ring
    TOKENS: gl.constexpr = inputs.shape[1]
    COLUMNS: gl.constexpr = inputs.shape[2]
    STEPS: gl.constexpr = (NUM_INPUTS + COLUMNS - 1) // COLUMNS
    ROWS: gl.constexpr = weights.shape[2] * weights.shape[3] * OCTET
    on_cores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, TOKENS, 16]
    )
    sums = gl.zeros([ROWS, TOKENS], gl.float32, on_cores)
    stage = 0
    phase = 0
    for first in range(0, STEPS // UNPACKED * UNPACKED, UNPACKED):
        for each in gl.static_range(UNPACKED):
            sums, scales, stage, phase = _multiply(
                first + each, sums, scales, stage, phase, weight, place, x_rows, is_row,
                scale_rows, ring, x_layout, NUM_ROWS, NUM_INPUTS, GROUP, UNPACKED,
            )  # fmt: skip
    if STEPS % UNPACKED != 0:
        sums = warpgroup_mma_wait(0, deps=[sums])
        sums, scales, stage, phase = _multiply(
            STEPS - 1, sums, scales, stage, phase, weight, place, x_rows, is_row, scale_rows, ring,
            x_layout, NUM_ROWS, NUM_INPUTS, GROUP, UNPACKED,
        )  # fmt: skip
    sums = warpgroup_mma_wait(0, deps=[sums])
    # Copies of zeros past the end are under way, and the results may pass through the same memory.
    async_copy.wait_group(0)
    if are_floats(GROUP):
        sums = finished(sums, scale_rows)
    return sums


@gluon.jit
def _compute_tile(
    weight, x_ptr, scale_ptr, bias_ptr, pairs_ptr, output_ptr, alpha, limit, expert, first_row, end,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr,
    PARTS: gl.constexpr, IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr, IS_CLAMPED: gl.constexpr,
    IS_ALONE: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, UNPACKED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes a tile of up to TOKENS tokens."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    OUTPUTS: gl.constexpr = ROWS // HALVES
    row = gl.program_id(0) * OUTPUTS
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    weights = gl.allocate_shared_memory(
        weight.dtype, [STAGES, 1, OUTPUTS // OCTET, HALVES, OCTET, COLUMNS // 2], weight.layout
    )
    inputs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, COLUMNS], x_shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    place = (expert, row // OCTET)
    for stage in gl.static_range(STAGES - 1):
        _fetch_weights(
            weight, place, weights.index(stage), ready.index(stage), stage * COLUMNS,
            ROWS * COLUMNS // 2, stage * COLUMNS < NUM_INPUTS,
        )  # fmt: skip
    NUM_ROWS: gl.constexpr = HALVES * NUM_OUTPUTS
    scale_rows = _scale_rows(
        scale_ptr, expert, row * HALVES, ROWS, COLUMNS, NUM_ROWS, NUM_INPUTS, GROUP, PARTS
    )
    scales = _load_scales(scale_rows, 0, COLUMNS, NUM_ROWS, NUM_INPUTS, GROUP)
    x_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // COLUMNS, COLUMNS // 8], [NUM_WARPS, 1], [1, 0]
    )
    x_rows = first_row + gl.arange(0, TOKENS, gl.SliceLayout(1, x_layout))
    is_row = x_rows < end
    if IS_GATED:
        if not IS_ALONE:
            x_rows = gl.load(pairs_ptr + x_rows, mask=is_row, other=0)
        x_rows = x_rows // TOP_K
    else:
        wait_for_previous(DEPENDENT)
    x_rows = x_ptr + x_rows.to(gl.int64) * NUM_INPUTS
    for stage in gl.static_range(STAGES - 1):
        fetch_inputs(x_rows, is_row, inputs.index(stage), stage * COLUMNS, x_layout, NUM_INPUTS)
    sums = _sum_tiles(
        weight, place, x_rows, is_row, scale_rows, scales, (weights, inputs, ready), x_layout,
        NUM_ROWS, NUM_INPUTS, GROUP, UNPACKED,
    )  # fmt: skip
    bias_ptr += expert.to(gl.int64) * (HALVES * NUM_OUTPUTS)
    results = results_of(
        sums, bias_ptr, row, alpha, limit, NUM_OUTPUTS, HAS_BIAS, IS_GATED, IS_CLAMPED
    )
    IS_BY_PAIR: gl.constexpr = not IS_GATED and not IS_ALONE
    store_results(results, pairs_ptr, output_ptr, row, first_row, end, NUM_OUTPUTS, IS_BY_PAIR)


@gluon.jit
def expert_kernel(
    weight, x_ptr, scale_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr, alpha, limit,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, GROUP: gl.constexpr,
    NUM_EXPERTS: gl.constexpr, TOP_K: gl.constexpr, PARTS: gl.constexpr, IS_GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, IS_CLAMPED: gl.constexpr, IS_ALONE: gl.constexpr, TOKENS: gl.constexpr,
    LAST_TOKENS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    UNPACKED: gl.constexpr, BLOCK_E: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes gated inner features from tokens in order of their rows, or results by pair.

    The order of rows is older than the previous kernel unless IS_GATED. NUM_OUTPUTS are those of
    gate and of up alone. An expert's last tile has a height of LAST_TOKENS if its rows fit.
    scale_ptr: words; word_scales describes GROUP. PARTS: matrices that are stacked, if not gated.
    """
    if IS_GATED:
        wait_for_previous(DEPENDENT)
    # Only now, so that the next kernel may read the order of rows before its own wait.
    let_next_start(DEPENDENT)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    expert, first_row, end = _find_rows(
        gl.program_id(1), pairs_ptr, starts_ptr, flat, NUM_EXPERTS, TOKENS, BLOCK_E, IS_ALONE
    )
    if first_row >= end:
        return
    if LAST_TOKENS < TOKENS and first_row + LAST_TOKENS >= end:
        _compute_tile(
            weight, x_ptr, scale_ptr, bias_ptr, pairs_ptr, output_ptr, alpha, limit, expert,
            first_row, end, NUM_OUTPUTS, NUM_INPUTS, GROUP, TOP_K, PARTS, IS_GATED, HAS_BIAS,
            IS_CLAMPED, IS_ALONE, LAST_TOKENS, ROWS, COLUMNS, STAGES, UNPACKED, DEPENDENT,
        )  # fmt: skip
    else:
        _compute_tile(
            weight, x_ptr, scale_ptr, bias_ptr, pairs_ptr, output_ptr, alpha, limit, expert,
            first_row, end, NUM_OUTPUTS, NUM_INPUTS, GROUP, TOP_K, PARTS, IS_GATED, HAS_BIAS,
            IS_CLAMPED, IS_ALONE, TOKENS, ROWS, COLUMNS, STAGES, UNPACKED, DEPENDENT,
        )  # fmt: skip
