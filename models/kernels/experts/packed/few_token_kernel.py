"""Experts of 4 bits with few tokens each on Hopper: one warp fetches and groups of warps multiply.

With few tokens, expert_kernel issues more instructions around a product than memory gives it time
for. Here the copy engine fetches scales like weights, into a ring that goes on from tile to tile;
the inputs of up to TOKENS tokens stay in shared memory for all rows of their expert; and groups
unpack and multiply 64 rows each. A program computes an equal share of all tiles, in order of tokens
and then of rows. Sums have the bits of expert_kernel.
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

from models.kernels.experts.packed.expert_kernel import (
    OCTET,
    fetch_inputs,
    results_of,
    store_results,
)
from models.kernels.experts.packed.word_scales import (
    are_floats,
    scales_of,
    tile_layout,
    words_of_columns,
    words_of_row,
)
from models.kernels.experts.token_tiles import after, tiles_of_experts
from models.kernels.launching.dependent_launch import let_next_start, wait_for_previous
from models.kernels.launching.gluon_names import load_box, reinterpret
from models.kernels.products.packed.matrix_weights import finished, unpacked

GROUP_ROWS = gl.constexpr(64)
"""Of a tile, for each group of four warps."""


@gluon.jit
def _own_tiles(
    starts_ptr, NUM_EXPERTS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_E: gl.constexpr,
    ROW_TILES: gl.constexpr,
):  # fmt: skip
    """Returns the program's first tile and the end of its tiles, and the experts' tiles of tokens.

    The latter are, for each expert, its number, its first row and the end of its rows, and how many
    tiles of tokens it has, and all experts before it.
    BLOCK_E: at least 32. Then a warp adds up in an instruction whose result ptxas knows to be the
        same in all lanes: a step of _multiply takes 178 instructions, 214 otherwise.
    """
    of_experts = tiles_of_experts(starts_ptr, NUM_EXPERTS, TOKENS, BLOCK_E)
    num_tiles = gl.sum(of_experts[3], 0) * ROW_TILES
    first = gl.program_id(0) * num_tiles // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * num_tiles // gl.num_programs(0)
    return first, end, of_experts


@gluon.jit
def _find_rows(token_tile, of_experts, TOKENS: gl.constexpr):
    """Returns a tile's expert, its first row, and the end of the expert's rows."""
    experts, starts, ends, counts, before = of_experts
    is_own = (before <= token_tile) & (token_tile < before + counts)
    expert = gl.sum(gl.where(is_own, experts, 0), 0)
    first_row = gl.sum(gl.where(is_own, starts + (token_tile - before) * TOKENS, 0), 0)
    return expert, first_row, gl.sum(gl.where(is_own, ends, 0), 0)


@gluon.jit
def _words_of(tile, step, FIRST_ROW: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """Returns a group's words of scales for a step, of a tile with those of 128 columns."""
    EACH: gl.constexpr = words_of_columns(128, GROUP)
    WORDS: gl.constexpr = words_of_columns(COLUMNS, GROUP)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    layout: gl.constexpr = tile_layout(GROUP_ROWS, COLUMNS, 4, GROUP)
    rows = reinterpret(tile, gl.int32, [tile.shape[1] // EACH, EACH], plain)
    rows = rows.slice(FIRST_ROW, GROUP_ROWS)
    if WORDS == EACH:
        return rows.load(layout)
    else:  # noqa: RET505  # one branch is compiled
        # A step has half of them.
        first = rows.slice(0, WORDS, dim=1).load(layout)
        second = rows.slice(WORDS, WORDS, dim=1).load(layout)
        return gl.where(step % 2 == 0, first, second)


@gluon.jit
def _multiply_step(
    sums, step, ring, inputs, slot, phase, FIRST_ROW: gl.constexpr, GROUP: gl.constexpr
):
    """Adds a step's product to a group's sums and frees the slot."""
    weights, scales, ready, empty = ring
    on_cores: gl.constexpr = sums.type.layout
    ROWS: gl.constexpr = weights.shape[2] * weights.shape[3] * OCTET
    COLUMNS: gl.constexpr = inputs.shape[2]
    mbarrier.wait(ready.index(slot), phase)
    words = _words_of(scales.index(slot), step, FIRST_ROW, COLUMNS, GROUP)
    tile = weights.index(slot).reshape([ROWS, COLUMNS // 2])
    left = unpacked(tile, scales_of(words, step, COLUMNS, GROUP), on_cores, FIRST_ROW)
    right = inputs.index(step).permute((1, 0))
    sums = warpgroup_mma(left, right, sums, is_async=True)
    mbarrier.arrive(empty.index(slot))
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def _multiply(
    operands, FIRST_ROW: gl.constexpr, NUM_OUTPUTS: gl.constexpr, GROUP: gl.constexpr,
    NUM_EXPERTS: gl.constexpr, IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    IS_CLAMPED: gl.constexpr, BLOCK_E: gl.constexpr,
):  # fmt: skip
    """Computes a group's rows of the program's tiles, from FIRST_ROW of each tile on."""
    ring, inputs, starts_ptr, pairs_ptr, scale_ptr, bias_ptr, output_ptr, alpha, limit = operands
    xs, xs_ready, xs_empty = inputs
    STEPS: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    SLOTS: gl.constexpr = ring[0].shape[0]
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    OUTPUTS: gl.constexpr = ring[0].shape[2] * OCTET
    ROW_TILES: gl.constexpr = (NUM_OUTPUTS + OUTPUTS - 1) // OUTPUTS
    on_cores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16]
    )
    tile, end_tile, of_experts = _own_tiles(starts_ptr, NUM_EXPERTS, TOKENS, BLOCK_E, ROW_TILES)
    slot, phase, xs_phase = 0, 0, 0
    while tile < end_tile:
        expert, first_row, end = _find_rows(tile // ROW_TILES, of_experts, TOKENS)
        bias_of_expert = bias_ptr + expert.to(gl.int64) * (HALVES * NUM_OUTPUTS)
        end_of_tokens = gl.minimum((tile // ROW_TILES + 1) * ROW_TILES, end_tile)
        mbarrier.wait(xs_ready, xs_phase)
        xs_phase ^= 1
        while tile < end_of_tokens:
            sums = gl.zeros([GROUP_ROWS, TOKENS], gl.float32, on_cores)
            for step in range(STEPS):
                sums = _multiply_step(sums, step, ring, xs, slot, phase, FIRST_ROW, GROUP)
                slot, phase = after(slot, phase, SLOTS)
            row = tile % ROW_TILES * OUTPUTS + FIRST_ROW // HALVES
            if are_floats(GROUP):
                sums = finished(sums, scale_ptr)
            results = results_of(
                sums, bias_of_expert, row, alpha, limit, NUM_OUTPUTS, HAS_BIAS, IS_GATED,
                IS_CLAMPED,
            )  # fmt: skip
            store_results(
                results, pairs_ptr, output_ptr, row, first_row, end, NUM_OUTPUTS, not IS_GATED
            )
            tile += 1
        mbarrier.arrive(xs_empty)


@gluon.jit
def _fetch_steps(
    first, end, slot, phase, weight, scale, ring, expert, tile, STEPS: gl.constexpr,
    NUM_WORDS: gl.constexpr, ROW_TILES: gl.constexpr,
):  # fmt: skip
    """Fetches steps of an expert's tiles, counted from the first step of `tile`."""
    weights, scales, ready, empty = ring
    SLOTS: gl.constexpr = weights.shape[0]
    ROW_WORDS: gl.constexpr = scales.shape[2]
    COLUMNS: gl.constexpr = 2 * weights.shape[5]
    ROWS: gl.constexpr = weights.shape[2] * weights.shape[3] * OCTET
    for at in range(first, end):
        step = at % STEPS
        row_tile = tile % ROW_TILES + at // STEPS
        mbarrier.wait(empty.index(slot), phase ^ 1)
        bar = ready.index(slot)
        mbarrier.expect(bar, ROWS * COLUMNS // 2 + ROW_WORDS * 4)
        octet = row_tile * weights.shape[2]
        load_box(weight, [expert, octet, 0, 0, step * (COLUMNS // 2)], bar, weights.index(slot))
        load_box(
            scale,
            [expert * NUM_WORDS + step * COLUMNS // 128, row_tile * ROW_WORDS],
            bar,
            scales.index(slot),
        )
        slot, phase = after(slot, phase, SLOTS)
    return slot, phase


@gluon.jit
def _fetch(
    weight, scale, x_ptr, ring, inputs, starts_ptr, pairs_ptr,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, NUM_EXPERTS: gl.constexpr,
    TOP_K: gl.constexpr, IS_GATED: gl.constexpr, BLOCK_E: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Fetches the program's tiles, in one warp; experts first, as they wait for no kernel."""
    weights, _scales, _ready, _empty = ring
    xs, xs_ready, xs_empty = inputs
    SLOTS: gl.constexpr = weights.shape[0]
    STEPS: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    COLUMNS: gl.constexpr = xs.shape[2]
    NUM_WORDS: gl.constexpr = words_of_row(NUM_INPUTS)
    OUTPUTS: gl.constexpr = weights.shape[2] * OCTET
    ROW_TILES: gl.constexpr = (NUM_OUTPUTS + OUTPUTS - 1) // OUTPUTS
    x_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // COLUMNS, COLUMNS // 8], [1, 1], [1, 0]
    )
    tile, end_tile, of_experts = _own_tiles(starts_ptr, NUM_EXPERTS, TOKENS, BLOCK_E, ROW_TILES)
    slot, phase, xs_phase = 0, 0, 0
    while tile < end_tile:
        expert, first_row, end = _find_rows(tile // ROW_TILES, of_experts, TOKENS)
        end_of_tokens = gl.minimum((tile // ROW_TILES + 1) * ROW_TILES, end_tile)
        num_steps = (end_of_tokens - tile) * STEPS
        num_first = gl.minimum(SLOTS, num_steps)
        slot, phase = _fetch_steps(
            0, num_first, slot, phase, weight, scale, ring, expert, tile, STEPS, NUM_WORDS,
            ROW_TILES,
        )  # fmt: skip
        if not IS_GATED:
            wait_for_previous(DEPENDENT)
        x_rows = first_row + gl.arange(0, TOKENS, gl.SliceLayout(1, x_layout))
        is_row = x_rows < end
        if IS_GATED:
            x_rows = gl.load(pairs_ptr + x_rows, mask=is_row, other=0) // TOP_K
        x_rows = x_ptr + x_rows.to(gl.int64) * NUM_INPUTS
        mbarrier.wait(xs_empty, xs_phase ^ 1)
        xs_phase ^= 1
        for step in range(STEPS):
            fetch_inputs(x_rows, is_row, xs.index(step), step * COLUMNS, x_layout, NUM_INPUTS)
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(xs_ready)
        slot, phase = _fetch_steps(
            num_first, num_steps, slot, phase, weight, scale, ring, expert, tile, STEPS, NUM_WORDS,
            ROW_TILES,
        )  # fmt: skip
        tile = end_of_tokens
    if not IS_GATED:
        # A rank may have no tokens, and kernels wait for the end of the one before them alone.
        wait_for_previous(DEPENDENT)


@gluon.jit
def few_token_kernel(
    weight, scale, x_ptr, scale_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr, alpha, limit,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, GROUP: gl.constexpr,
    NUM_EXPERTS: gl.constexpr, TOP_K: gl.constexpr, IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    IS_CLAMPED: gl.constexpr, TOKENS: gl.constexpr, GROUPS: gl.constexpr, COLUMNS: gl.constexpr,
    SLOTS: gl.constexpr, BLOCK_E: gl.constexpr, GROUP_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Does what expert_kernel does, for sorted rows.

    weight: [E, octets of outputs, halves, 8, bytes] of tiles [1, ., halves, 8, COLUMNS / 2].
    scale: [E * words, rows * each] int32 of tiles [1, ROWS * each]; word_scales describes GROUP.
    scale_ptr: of the same words.
    """
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    ROWS: gl.constexpr = GROUPS * GROUP_ROWS
    STEPS: gl.constexpr = (NUM_INPUTS + COLUMNS - 1) // COLUMNS
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    octets: gl.constexpr = [SLOTS, 1, ROWS // HALVES // OCTET, HALVES, OCTET, COLUMNS // 2]
    weights = gl.allocate_shared_memory(weight.dtype, octets, weight.layout)
    row_words: gl.constexpr = [SLOTS, 1, ROWS * words_of_columns(128, GROUP)]
    scales = gl.allocate_shared_memory(gl.int32, row_words, scale.layout)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STEPS, TOKENS, COLUMNS], x_shared)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    xs_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    xs_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    mbarrier.init(xs_ready, count=1)
    mbarrier.init(xs_empty, count=GROUPS)
    fence_async_shared()
    if IS_GATED:
        wait_for_previous(DEPENDENT)
    # Only now, so that the next kernel may read the order of rows before its own wait.
    let_next_start(DEPENDENT)
    ring = (weights, scales, ready, empty)
    inputs = (xs, xs_ready, xs_empty)
    operands = (
        ring, inputs, starts_ptr, pairs_ptr, scale_ptr, bias_ptr, output_ptr, alpha, limit,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    operands, 0, NUM_OUTPUTS, GROUP, NUM_EXPERTS, IS_GATED, HAS_BIAS,
                    IS_CLAMPED, BLOCK_E,
                )),
                (_multiply, (
                    operands, GROUP_ROWS, NUM_OUTPUTS, GROUP, NUM_EXPERTS, IS_GATED, HAS_BIAS,
                    IS_CLAMPED, BLOCK_E,
                )),
                (_fetch, (
                    weight, scale, x_ptr, ring, inputs, starts_ptr, pairs_ptr, NUM_OUTPUTS,
                    NUM_INPUTS, NUM_EXPERTS, TOP_K, IS_GATED, BLOCK_E, DEPENDENT,
                )),
            ],
            [4, 1],
            [GROUP_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    operands, 0, NUM_OUTPUTS, GROUP, NUM_EXPERTS, IS_GATED, HAS_BIAS,
                    IS_CLAMPED, BLOCK_E,
                )),
                (_multiply, (
                    operands, GROUP_ROWS, NUM_OUTPUTS, GROUP, NUM_EXPERTS, IS_GATED, HAS_BIAS,
                    IS_CLAMPED, BLOCK_E,
                )),
                (_multiply, (
                    operands, 2 * GROUP_ROWS, NUM_OUTPUTS, GROUP, NUM_EXPERTS, IS_GATED, HAS_BIAS,
                    IS_CLAMPED, BLOCK_E,
                )),
                (_multiply, (
                    operands, 3 * GROUP_ROWS, NUM_OUTPUTS, GROUP, NUM_EXPERTS, IS_GATED, HAS_BIAS,
                    IS_CLAMPED, BLOCK_E,
                )),
                (_fetch, (
                    weight, scale, x_ptr, ring, inputs, starts_ptr, pairs_ptr, NUM_OUTPUTS,
                    NUM_INPUTS, NUM_EXPERTS, TOP_K, IS_GATED, BLOCK_E, DEPENDENT,
                )),
            ],
            [4, 4, 4, 1],
            [GROUP_REGISTERS, GROUP_REGISTERS, GROUP_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
