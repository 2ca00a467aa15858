"""Products of FP8 activations and FP8 weights, for Hopper's tensor cores.

Each of two warp groups of a program multiplies 64 tokens with a tile of the weight's rows; one more
warp has the copy engine load tiles of 128 inputs into a ring of slots. Tensor cores add FP8
products in fewer than 32 bits, so that the sum over each 128 inputs is scaled and added to the
others by ordinary arithmetic, of one group while the other's product runs.

A gated product multiplies the tokens with as many rows of the gate as of up, and may round its
result to FP8: its tiles are as wide as the blocks that share a scale.
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

from models.kernels.gpu import num_multiprocessors
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.gluon_names import load_box, reinterpret
from models.kernels.launching.launch import Launch
from models.kernels.products.fp8.fp8_configurations import FP8_TOKENS
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
from models.kernels.products.tile_order import first_token_of, place_of
from models.kernels.tuning.tiles import WideFP8Tiles
from models.number_formats import BLOCK
from models.operands.token_scales import TOKEN_ALIGNMENT
from models.operands.weight_scales import is_by_block

_GROUP_TOKENS = gl.constexpr(64)
_TOKENS = gl.constexpr(FP8_TOKENS)
_GROUPS = gl.constexpr(FP8_TOKENS // _GROUP_TOKENS.value)
_TOKEN_ALIGNMENT = gl.constexpr(TOKEN_ALIGNMENT)
_MOST_REGISTERS = {64: 96, 128: 168}
"""Of a thread when a program starts, by rows of a product.

96 leave room for a program of the next norm, which then starts before the product has ended: a
layer of Qwen3-8B with 128 tokens took 4.8 us less than with 168 (H200, 2026-11).
"""
_GROUP_REGISTERS = {64: 120, 128: 232}
"""Of a thread of the second group."""
_LOAD_REGISTERS = 40
"""Of a thread of the warp that loads."""


@gluon.jit
def _load(
    x, weight, ring, x_scale, num_tokens, counts, first_step, STEPS: gl.constexpr,
    BLOCKED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Loads the steps of all of the program's tiles, with the tokens' scales of blocks.

    Weights need no wait, as no kernel writes them.
    """
    weights, xs, scales, full, empty = ring
    SLOTS: gl.constexpr = weights.shape[0]
    TILE_ROWS: gl.constexpr = weight.block_shape[1]
    FACTOR_BYTES: gl.constexpr = (weight.block_shape[0] * TILE_ROWS + _TOKENS) * DEPTH
    NUM_BYTES: gl.constexpr = FACTOR_BYTES + (_TOKENS * 4 if BLOCKED else 0)
    slot = 0
    phase = 1
    is_first = True
    for tile in range(gl.program_id(0), counts[2], gl.num_programs(0)):
        row_tile, token_tile = place_of(tile, counts)
        token = first_token_of(token_tile, _TOKENS, num_tokens, _TOKEN_ALIGNMENT)
        for step in range(STEPS):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            depth = (first_step + step) * DEPTH
            mbarrier.expect(ready, NUM_BYTES)
            place = [0, row_tile * TILE_ROWS, depth]
            load_box(weight, place, ready, weights.index(slot))
            if is_first:
                wait_for_previous(DEPENDENT)
            is_first = False
            load_box(x, [token, depth], ready, xs.index(slot))
            if BLOCKED:
                place = [first_step + step, token]
                load_box(x_scale, place, ready, scales.index(slot))
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1


@gluon.jit
def _multiply_step(sums, left, right, token_scales, table, block, BLOCKED: gl.constexpr):
    """Adds the product of 128 inputs of this group's tokens, with their scales if BLOCKED."""
    layout: gl.constexpr = sums.type.layout
    # Scales are loaded before the product, during which no registers are left.
    if BLOCKED:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        of_tokens: gl.constexpr = gl.SliceLayout(1, layout)
        scales = reinterpret(token_scales, gl.float32, [_GROUP_TOKENS], plain).load(of_tokens)
        row_scales = reinterpret(table, gl.float32, [table.shape[0], 1], plain)
        scales *= row_scales.index(block).load(of_tokens)
    none = gl.zeros(sums.shape, gl.float32, layout)
    product = warpgroup_mma(left, right.permute((1, 0)), none, use_acc=False)
    if BLOCKED:
        product *= scales[:, None]
    return sums + product


@gluon.jit
def _multiply(
    ring, tables, operands, num_tokens, counts, first_step, GROUP: gl.constexpr,
    STEPS: gl.constexpr, NUM_OUTPUTS: gl.constexpr, NUM_BLOCKS: gl.constexpr, ROWS: gl.constexpr,
    GATED: gl.constexpr, BLOCKED: gl.constexpr, SPLITS: gl.constexpr, DTYPE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes one group's tokens of all of the program's tiles.

    A tile's rows are one or two times ROWS, each with a product of its own.
    """
    weights, xs, scales, full, empty = ring
    # A group's tokens, found without an offset in a tile, take fewer registers.
    xs = reinterpret(xs, xs.dtype, [xs.shape[0] * _GROUPS, _GROUP_TOKENS, DEPTH], xs.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    scales = reinterpret(scales, gl.float32, [scales.shape[0] * _GROUPS, _GROUP_TOKENS], plain)
    first_table = tables.index(GROUP * 2)
    second_table = tables.index(GROUP * 2 + 1)
    SLOTS: gl.constexpr = weights.shape[0]
    TILE_ROWS: gl.constexpr = weights.shape[1] * weights.shape[2]
    PRODUCTS: gl.constexpr = TILE_ROWS // ROWS
    WIDTH: gl.constexpr = TILE_ROWS // (2 if GATED else 1)
    # Of all rows, gate's and up's.
    NUM_ROW_BLOCKS: gl.constexpr = (NUM_OUTPUTS * (2 if GATED else 1) + DEPTH - 1) // DEPTH
    SECOND_BLOCK: gl.constexpr = (NUM_OUTPUTS if GATED else ROWS) // DEPTH
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    wait_for_previous(DEPENDENT)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), counts[2], gl.num_programs(0)):
        row_tile, token_tile = place_of(tile, counts)
        token = first_token_of(token_tile, _TOKENS, num_tokens, _TOKEN_ALIGNMENT)
        token += GROUP * _GROUP_TOKENS
        output = row_tile * WIDTH
        if BLOCKED:
            row_block = output // DEPTH
            keep_row_scales(first_table, operands[1], row_block, NUM_BLOCKS)
            row_block = gl.minimum(row_block + SECOND_BLOCK, NUM_ROW_BLOCKS - 1)
            keep_row_scales(second_table, operands[1], row_block, NUM_BLOCKS)
        first = gl.zeros([_GROUP_TOKENS, ROWS], gl.float32, layout)
        second = first
        for step in range(STEPS):
            mbarrier.wait(full.index(slot), phase)
            left = xs.index(slot * _GROUPS + GROUP)
            right = weights.index(slot).reshape([TILE_ROWS, DEPTH])
            token_scales = scales.index(slot * _GROUPS + GROUP)
            # Past the last block inputs are zeros.
            block = gl.minimum(first_step + step, NUM_BLOCKS - 1)
            first = _multiply_step(
                first, left, right.slice(0, ROWS), token_scales, first_table, block, BLOCKED
            )
            if PRODUCTS == 2:
                rows = right.slice(ROWS, ROWS)
                second = _multiply_step(
                    second, left, rows, token_scales, second_table, block, BLOCKED
                )
            mbarrier.arrive(empty.index(slot))
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1
        if GATED:
            store_gated(
                first,
                second,
                operands,
                token,
                output,
                num_tokens,
                0,
                0,
                NUM_OUTPUTS,
                BLOCKED,
                DTYPE,
            )
        else:
            store_sums(first, operands, token, output, num_tokens, 0, NUM_OUTPUTS, BLOCKED, SPLITS)
            if PRODUCTS == 2:
                output += ROWS
                store_sums(
                    second, operands, token, output, num_tokens, 0, NUM_OUTPUTS, BLOCKED, SPLITS
                )


@gluon.jit(do_not_specialize=["num_tokens"])
def _wide_fp8_kernel(
    x, weight, x_scale, weight_scale_ptr, bias_ptr, output_ptr, output_scale_ptr, num_tokens,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr,
    BLOCKED: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr, DTYPE: gl.constexpr,
    TABLE_BLOCKS: gl.constexpr, GROUP_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes tiles of all outputs, over the inputs of one split.

    x_scale: of rows a pointer, of blocks what the copy engine needs.
    """
    let_next_start(DEPENDENT)
    NUM_BLOCKS: gl.constexpr = (NUM_INPUTS + DEPTH - 1) // DEPTH
    STEPS: gl.constexpr = (NUM_BLOCKS + SPLITS - 1) // SPLITS
    WIDTH: gl.constexpr = weight.block_shape[1]
    num_row_tiles = (NUM_OUTPUTS + WIDTH - 1) // WIDTH
    num_token_tiles = (num_tokens + _TOKENS - 1) // _TOKENS
    counts = (num_row_tiles, num_token_tiles, num_row_tiles * num_token_tiles)
    first_step = gl.program_id(1) * STEPS
    weights = gl.allocate_shared_memory(
        weight.dtype, [SLOTS, weight.block_shape[0], WIDTH, DEPTH], weight.layout
    )
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS, _TOKENS, DEPTH], x.layout)
    scales = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, _TOKENS], SCALE_LAYOUT)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    tables = gl.allocate_shared_memory(gl.float32, [4, TABLE_BLOCKS], plain)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    ring = (weights, xs, scales, full, empty)
    operands = (x_scale, weight_scale_ptr, bias_ptr, output_ptr, (output_scale_ptr,))
    gl.warp_specialize(
        [
            (_multiply, (
                ring, tables, operands, num_tokens, counts, first_step, 0, STEPS, NUM_OUTPUTS,
                NUM_BLOCKS, ROWS, GATED, BLOCKED, SPLITS, DTYPE, DEPENDENT,
            )),
            (_multiply, (
                ring, tables, operands, num_tokens, counts, first_step, 1, STEPS, NUM_OUTPUTS,
                NUM_BLOCKS, ROWS, GATED, BLOCKED, SPLITS, DTYPE, DEPENDENT,
            )),
            (_load, (
                x, weight, ring, x_scale, num_tokens, counts, first_step, STEPS, BLOCKED, DEPENDENT,
            )),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def launch_wide(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: WideFP8Tiles,
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
    rows = tiles.rows * tiles.products // halves
    is_blocked = is_by_block(weight, weight_scale)
    launch = _launcher(num_outputs, num_inputs, is_gated, is_blocked, tiles, dtype, weight.device)
    num_tiles = -(-num_outputs // rows) * -(-num_tokens // FP8_TOKENS)
    launch(
        (min(num_multiprocessors(weight.device) // tiles.splits, num_tiles), tiles.splits, 1),
        described_tokens(rounded, FP8_TOKENS),
        described_weight(weight, halves, rows),
        described_scales(scale, FP8_TOKENS) if is_blocked else scale,
        weight_scale, bias, output, output_scale, num_tokens,
    )  # fmt: skip


@lru_cache
def _launcher(
    num_outputs: int,
    num_inputs: int,
    is_gated: bool,
    is_blocked: bool,
    tiles: WideFP8Tiles,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    num_blocks = -(-num_inputs // BLOCK)
    return Launch(
        _wide_fp8_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, ROWS=tiles.rows,
        GATED=is_gated, BLOCKED=is_blocked, SPLITS=tiles.splits, SLOTS=tiles.slots,
        DTYPE=DTYPES[dtype], TABLE_BLOCKS=triton.next_power_of_2(num_blocks),
        GROUP_REGISTERS=_GROUP_REGISTERS[tiles.rows], LOAD_REGISTERS=_LOAD_REGISTERS,
        num_warps=4, maxnreg=_MOST_REGISTERS[tiles.rows], **launch_options(device),
    )  # fmt: skip
