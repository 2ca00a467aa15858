"""Products of few tokens that are rounded to FP8 with FP8 weights, for Hopper's tensor cores.

Such a product takes as long as reading its weight. Each warp group of a program multiplies 64 rows
of the weight with all tokens; one more warp has the copy engine load tiles of 128 inputs into a
ring of slots, of weights as many as fit before the previous kernel has ended. As in
wide_fp8_linear the sum over each 128 inputs is scaled and added to the others by ordinary
arithmetic.

A gated product multiplies as many rows of the gate as of up, and may round its result to FP8: its
tiles are as wide as the blocks that share a scale.
"""

from functools import lru_cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.gluon_names import load_box, reinterpret
from models.kernels.launching.launch import Launch
from models.kernels.products.fp8.fp8_configurations import LEAST_SCALES
from models.kernels.products.fp8.fp8_operands import (
    DEPTH,
    DTYPES,
    SCALE_LAYOUT,
    described_scales,
    described_tokens,
    described_weight,
)
from models.kernels.products.fp8.fp8_results import store_gated, store_sums
from models.kernels.products.fp8.row_block_scales import keep_row_scales
from models.kernels.tuning.tiles import GROUP_ROWS, NarrowFP8Tiles
from models.number_formats import BLOCK
from models.operands.weight_scales import is_by_block

_GROUP_ROWS = gl.constexpr(GROUP_ROWS)
_LOAD_REGISTERS = 40
"""Of a thread of the warp that loads."""
_GROUP_REGISTERS = {1: 232, 2: 104}
"""Of a thread of the second group, by programs of a multiprocessor."""
_GATED_REGISTERS = {(1, 2): 128, (2, 1): 168, (2, 2): 80}
"""Of a thread when a program of a gated product starts, by groups and programs as in its tiles."""
_UNGATED_REGISTERS = {8: 128, 16: 48, 32: 64, 64: 72}
"""The same of other products, by tokens of a tile.

Up to 72 leave room for a program of the next norm, which then starts before the product has ended:
a layer of Qwen3-8B took 2.2, 2.4 and 6.1 us less with 16, 32 and 64 tokens than with 128 registers,
but 0.5 us more with 8 tokens and 48 registers (H200, 2026-11).
"""


@gluon.jit
def _load_inputs(x, x_scale, ring, slot, first_step, step, BLOCKED: gl.constexpr):
    """Loads the tokens' inputs of a step, and their scales of blocks."""
    _, xs, scales, full, _ = ring
    ready = full.index(slot)
    load_box(x, [0, (first_step + step) * DEPTH], ready, xs.index(slot))
    if BLOCKED:
        place = [first_step + step, 0]
        load_box(x_scale, place, ready, scales.index(slot))


@gluon.jit
def _load(
    x, weight, ring, x_scale, row, first_step, STEPS: gl.constexpr, BLOCKED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Loads all steps; weights need no wait, as no kernel writes them."""
    weights, xs, scales, full, empty = ring
    SLOTS: gl.constexpr = xs.shape[0]
    FIRST: gl.constexpr = min(SLOTS, STEPS)
    TOKENS: gl.constexpr = xs.shape[1]
    FACTOR_BYTES: gl.constexpr = (weight.block_shape[0] * weight.block_shape[1] + TOKENS) * DEPTH
    NUM_BYTES: gl.constexpr = FACTOR_BYTES + (scales.shape[2] * 4 if BLOCKED else 0)
    for step in range(FIRST):
        mbarrier.expect(full.index(step), NUM_BYTES)
        place = [0, row, (first_step + step) * DEPTH]
        load_box(weight, place, full.index(step), weights.index(step))
    wait_for_previous(DEPENDENT)
    for step in range(FIRST):
        _load_inputs(x, x_scale, ring, step, first_step, step, BLOCKED)
    slot = 0
    phase = 0
    for step in range(FIRST, STEPS):
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), NUM_BYTES)
        place = [0, row, (first_step + step) * DEPTH]
        load_box(weight, place, full.index(slot), weights.index(slot))
        _load_inputs(x, x_scale, ring, slot, first_step, step, BLOCKED)
        slot += 1
        if slot == SLOTS:
            slot = 0
            phase ^= 1


@gluon.jit
def _multiply_step(sums, left, right, token_scales, table, block, BLOCKED: gl.constexpr):
    """Adds the product of 128 inputs [rows, tokens], with their scales if BLOCKED."""
    layout: gl.constexpr = sums.type.layout
    none = gl.zeros(sums.shape, gl.float32, layout)
    product = warpgroup_mma(left, right.permute((1, 0)), none, use_acc=False)
    if BLOCKED:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        of_tokens: gl.constexpr = gl.SliceLayout(0, layout)
        scales = reinterpret(token_scales, gl.float32, [token_scales.shape[1]], plain)
        scales = scales.slice(0, sums.shape[1]).load(of_tokens)
        row_scales = reinterpret(table, gl.float32, [table.shape[0], 1], plain)
        product *= (scales * row_scales.index(block).load(of_tokens))[None, :]
    return sums + product


@gluon.jit
def _multiply(
    ring, tables, operands, num_tokens, row, first_step, GROUP: gl.constexpr,
    STEPS: gl.constexpr, NUM_OUTPUTS: gl.constexpr, NUM_BLOCKS: gl.constexpr,
    GATED: gl.constexpr, BLOCKED: gl.constexpr, SPLITS: gl.constexpr, DTYPE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes one group's rows, of a gated product of both halves."""
    weights, xs, scales, full, empty = ring
    SLOTS: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    HALVES: gl.constexpr = weights.shape[1]
    ROWS: gl.constexpr = weights.shape[2]
    NUM_ROW_BLOCKS: gl.constexpr = (HALVES * NUM_OUTPUTS + DEPTH - 1) // DEPTH
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    output = row + GROUP * _GROUP_ROWS
    first_table = tables.index(GROUP * 2)
    second_table = tables.index(GROUP * 2 + 1)
    if BLOCKED:
        row_block = gl.minimum(output // DEPTH, NUM_ROW_BLOCKS - 1)
        keep_row_scales(first_table, operands[1], row_block, NUM_BLOCKS)
        if GATED:
            row_block += NUM_OUTPUTS // DEPTH
            keep_row_scales(second_table, operands[1], row_block, NUM_BLOCKS)
    wait_for_previous(DEPENDENT)
    first = gl.zeros([_GROUP_ROWS, TOKENS], gl.float32, layout)
    second = first
    slot = 0
    phase = 0
    for step in range(STEPS):
        mbarrier.wait(full.index(slot), phase)
        left = weights.index(slot).reshape([HALVES * ROWS, DEPTH])
        right = xs.index(slot)
        token_scales = scales.index(slot)
        # Past the last block inputs are zeros.
        block = gl.minimum(first_step + step, NUM_BLOCKS - 1)
        rows = left.slice(GROUP * _GROUP_ROWS, _GROUP_ROWS)
        first = _multiply_step(first, rows, right, token_scales, first_table, block, BLOCKED)
        if GATED:
            rows = left.slice(ROWS + GROUP * _GROUP_ROWS, _GROUP_ROWS)
            second = _multiply_step(second, rows, right, token_scales, second_table, block, BLOCKED)
        mbarrier.arrive(empty.index(slot))
        slot += 1
        if slot == SLOTS:
            slot = 0
            phase ^= 1
    if GATED:
        store_gated(
            first, second, operands, 0, output, num_tokens, 1, GROUP, NUM_OUTPUTS, BLOCKED, DTYPE
        )
    else:
        store_sums(first, operands, 0, output, num_tokens, 1, NUM_OUTPUTS, BLOCKED, SPLITS)


@gluon.jit(do_not_specialize=["num_tokens"])
def _narrow_fp8_kernel(
    x, weight, x_scale, weight_scale_ptr, bias_ptr, output_ptr, output_scale_ptr, num_tokens,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, TOKENS: gl.constexpr,
    SCALES: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr, BLOCKED: gl.constexpr,
    SPLITS: gl.constexpr, SLOTS: gl.constexpr, DTYPE: gl.constexpr, TABLE_BLOCKS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes 64 outputs of each group for all tokens, over the inputs of one split.

    x_scale: of rows a pointer, of blocks what the copy engine needs.
    """
    let_next_start(DEPENDENT)
    NUM_BLOCKS: gl.constexpr = (NUM_INPUTS + DEPTH - 1) // DEPTH
    STEPS: gl.constexpr = (NUM_BLOCKS + SPLITS - 1) // SPLITS
    row = gl.program_id(0) * GROUPS * _GROUP_ROWS
    first_step = gl.program_id(1) * STEPS
    weights = gl.allocate_shared_memory(
        weight.dtype, [SLOTS, weight.block_shape[0], GROUPS * _GROUP_ROWS, DEPTH], weight.layout
    )
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS, TOKENS, DEPTH], x.layout)
    scales = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, SCALES], SCALE_LAYOUT)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    tables = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, TABLE_BLOCKS], plain)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    # An unused barrier's memory would serve as something else, which the hardware would overwrite.
    rounding = (output_scale_ptr,)
    if output_scale_ptr is not None:
        amaxes = gl.allocate_shared_memory(gl.float32, [GROUPS, TOKENS], plain)
        known = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(known, count=GROUPS)
        rounding = (output_scale_ptr, amaxes, known)  # type: ignore[assignment]  # one is compiled
    fence_async_shared()
    ring = (weights, xs, scales, full, empty)
    operands = (x_scale, weight_scale_ptr, bias_ptr, output_ptr, rounding)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    ring, tables, operands, num_tokens, row, first_step, 0, STEPS,
                    NUM_OUTPUTS, NUM_BLOCKS, GATED, BLOCKED, SPLITS, DTYPE, DEPENDENT,
                )),
                (_load, (x, weight, ring, x_scale, row, first_step, STEPS, BLOCKED, DEPENDENT)),
            ],
            [1],
            [LOAD_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    ring, tables, operands, num_tokens, row, first_step, 0, STEPS,
                    NUM_OUTPUTS, NUM_BLOCKS, GATED, BLOCKED, SPLITS, DTYPE, DEPENDENT,
                )),
                (_multiply, (
                    ring, tables, operands, num_tokens, row, first_step, 1, STEPS,
                    NUM_OUTPUTS, NUM_BLOCKS, GATED, BLOCKED, SPLITS, DTYPE, DEPENDENT,
                )),
                (_load, (x, weight, ring, x_scale, row, first_step, STEPS, BLOCKED, DEPENDENT)),
            ],
            [4, 1],
            [GROUP_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip


def launch_narrow(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: NarrowFP8Tiles,
    output: torch.Tensor,
    output_scale: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    is_gated: bool,
) -> None:
    """Runs the kernel; see models.kernels.products.fp8.rounded_linear."""
    num_tokens, num_inputs = rounded.shape
    halves = 2 if is_gated else 1
    num_outputs = len(weight) // halves
    rows = tiles.groups * GROUP_ROWS
    is_blocked = is_by_block(weight, weight_scale)
    launch = _launcher(num_outputs, num_inputs, is_gated, is_blocked, tiles, dtype, weight.device)
    launch(
        (-(-num_outputs // rows), tiles.splits, 1),
        described_tokens(rounded, tiles.tokens),
        described_weight(weight, halves, rows),
        described_scales(scale, _num_scales(tiles)) if is_blocked else scale,
        weight_scale, bias, output, output_scale, num_tokens,
    )  # fmt: skip


def _num_scales(tiles: NarrowFP8Tiles) -> int:
    return max(LEAST_SCALES, tiles.tokens)


@lru_cache
def _launcher(
    num_outputs: int,
    num_inputs: int,
    is_gated: bool,
    is_blocked: bool,
    tiles: NarrowFP8Tiles,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    num_blocks = -(-num_inputs // BLOCK)
    registers = _UNGATED_REGISTERS[tiles.tokens]
    if is_gated:
        registers = _GATED_REGISTERS[tiles.groups, tiles.programs]
    return Launch(
        _narrow_fp8_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, TOKENS=tiles.tokens,
        SCALES=_num_scales(tiles), GROUPS=tiles.groups, GATED=is_gated, BLOCKED=is_blocked,
        SPLITS=tiles.splits, SLOTS=tiles.slots, DTYPE=DTYPES[dtype],
        TABLE_BLOCKS=triton.next_power_of_2(num_blocks),
        GROUP_REGISTERS=_GROUP_REGISTERS[tiles.programs], LOAD_REGISTERS=_LOAD_REGISTERS,
        num_warps=4, maxnreg=registers, **launch_options(device),
    )  # fmt: skip
