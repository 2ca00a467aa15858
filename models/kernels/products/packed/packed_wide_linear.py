"""Products of a weight of 4 or 8 bits whose tiles of rows share inputs, for Hopper.

Each warp group of a program multiplies 64 rows of the weight with a tile of tokens: weights are the
left factor, unpacked into registers. One more warp has the copy engine load tiles of inputs and of
weights into a ring of slots.
"""

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.kernels.gpu import num_multiprocessors
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.gluon_names import barrier, load_box
from models.kernels.launching.launch import Launch
from models.kernels.products.packed.matrix_weights import finished, tile_scales, unpacked
from models.kernels.products.packed.packed_configurations import PACKED_COLUMNS, num_tiles
from models.kernels.products.packed.packed_scales import scale_operand
from models.kernels.products.row_tiles import (
    described_rows,
    gate_rows,
    load_rows,
    store_rows,
)
from models.kernels.products.tile_order import first_token_of, place_of
from models.kernels.tuning.tiles import GROUP_ROWS, PackedTiles
from models.operands.packed_weights import bits_of

_ROWS = gl.constexpr(GROUP_ROWS)
_COLUMNS = gl.constexpr(PACKED_COLUMNS)
_LOAD_REGISTERS = 40
_GROUP_REGISTERS = {(1, 1): 0, (2, 1): 232, (3, 1): 152, (2, 2): 104}
"""Registers of a group's threads, by groups of a program and programs of a multiprocessor.

One group is not specialised.
"""
_MOST_REGISTERS = {(1, 1): 255, (2, 1): 168, (3, 1): 128, (2, 2): 80}
"""Registers that a thread gets at launch: groups and the loading warp share out their sum."""
_INPUTS = gl.NVMMASharedLayout(128, 16, rank=2)


@gluon.jit
def _load(work, NUM_INPUTS: gl.constexpr, DEPENDENT: gl.constexpr):
    """Loads all of the program's tiles; weights before the wait, as no kernel writes them."""
    weight, x, ring, _, _, num_tokens, counts = work
    weights, xs, full, empty = ring
    SLOTS: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    GROUPS: gl.constexpr = weights.shape[0] // SLOTS
    STEPS: gl.constexpr = (NUM_INPUTS + _COLUMNS - 1) // _COLUMNS
    WIDTH: gl.constexpr = weights.shape[2]
    NUM_BYTES: gl.constexpr = GROUPS * _ROWS * WIDTH + TOKENS * _COLUMNS * 2
    slot = 0
    phase = 1
    is_first = True
    for tile in range(gl.program_id(0), counts[2], gl.num_programs(0)):
        row_tile, token_tile = place_of(tile, counts)
        token = first_token_of(token_tile, TOKENS, num_tokens)
        for step in range(STEPS):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            column = step * _COLUMNS
            mbarrier.expect(ready, NUM_BYTES)
            for group in gl.static_range(GROUPS):
                row = (row_tile * GROUPS + group) * _ROWS
                load_rows(weight, weights.index(slot * GROUPS + group), ready, row, step * WIDTH)
            if is_first:
                wait_for_previous(DEPENDENT)
            is_first = False
            load_box(x, [token, column], ready, xs.index(slot))
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1


@gluon.jit
def _scales(
    scale_ptrs, row, column, GATED: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, NUM_BITS: gl.constexpr,
):  # fmt: skip
    return tile_scales(
        scale_ptrs[0], scale_ptrs[1], row, column, _ROWS, _COLUMNS, SCALE_COLUMNS, NUM_OUTPUTS,
        NUM_INPUTS, 2 if GATED else 1, GATED, NUM_BITS,
    )  # fmt: skip


@gluon.jit
def _finished(sums, scale_ptrs, results, row, GATED: gl.constexpr, NUM_OUTPUTS: gl.constexpr):
    """Returns the sums of rows from `row` on with the scales' power of two and the bias."""
    bias_ptr, _ = results
    sums = finished(sums, scale_ptrs[0])
    rows = row + gl.arange(0, _ROWS, gl.SliceLayout(1, sums.type.layout))
    if GATED:
        rows = rows // 8 % 2 * NUM_OUTPUTS + rows // 16 * 8 + rows % 8
    is_inside = rows < NUM_OUTPUTS * (2 if GATED else 1)
    if bias_ptr is not None:
        sums += gl.load(bias_ptr + rows, mask=is_inside, other=0.0).to(gl.float32)[:, None]
    return sums


@gluon.jit
def _multiply(
    work, GROUP: gl.constexpr, GATED: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes one group's rows of all of the program's tiles."""
    _, _, ring, scale_ptrs, results, num_tokens, counts = work
    weights, xs, full, empty = ring
    output_ptr = results[1]
    SLOTS: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    GROUPS: gl.constexpr = weights.shape[0] // SLOTS
    STEPS: gl.constexpr = (NUM_INPUTS + _COLUMNS - 1) // _COLUMNS
    NUM_BITS: gl.constexpr = weights.shape[2] * 8 // _COLUMNS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    slot = 0
    phase = 0
    row_tile, token_tile = place_of(gl.program_id(0), counts)
    row = (row_tile * GROUPS + GROUP) * _ROWS
    scales = _scales(scale_ptrs, row, 0, GATED, SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, NUM_BITS)
    wait_for_previous(DEPENDENT)
    for tile in range(gl.program_id(0), counts[2], gl.num_programs(0)):
        # Past the last tile there is no place.
        next_tile = gl.minimum(tile + gl.num_programs(0), counts[2] - 1)
        next_row_tile, next_token_tile = place_of(next_tile, counts)
        next_row = (next_row_tile * GROUPS + GROUP) * _ROWS
        sums = gl.zeros([_ROWS, TOKENS], gl.float32, layout)
        for step in range(STEPS):
            # The scales of the next step load during this one's product.
            is_last = step + 1 == STEPS
            next_scales = _scales(
                scale_ptrs, gl.where(is_last, next_row, row),
                gl.where(is_last, 0, step + 1) * _COLUMNS, GATED, SCALE_COLUMNS, NUM_OUTPUTS,
                NUM_INPUTS, NUM_BITS,
            )  # fmt: skip
            mbarrier.wait(full.index(slot), phase)
            left = unpacked(weights.index(slot * GROUPS + GROUP), scales, layout)
            sums = warpgroup_mma(left, xs.index(slot).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            barrier()
            mbarrier.arrive(empty.index(slot))
            scales = next_scales
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1
        sums = _finished(sums, scale_ptrs, results, row, GATED, NUM_OUTPUTS)
        token = first_token_of(token_tile, TOKENS, num_tokens)
        if GATED:
            outputs = gate_rows(sums, output_ptr.dtype.element_ty, False)
            store_rows(outputs, output_ptr, row // 2, token, num_tokens, NUM_OUTPUTS)
        else:
            store_rows(sums, output_ptr, row, token, num_tokens, NUM_OUTPUTS)
        row = next_row
        token_tile = next_token_tile


@gluon.jit(do_not_specialize=["num_tokens"])
def _packed_wide_kernel(
    weight, x, scale_ptr, zero_ptr, bias_ptr, output_ptr, num_tokens,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    GROUPS: gl.constexpr, TOKENS: gl.constexpr, SLOTS: gl.constexpr, GATED: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes tiles of all outputs. Pointers to what a weight does not have are None."""
    let_next_start(DEPENDENT)
    WIDTH: gl.constexpr = GROUPS * _ROWS // (2 if GATED else 1)
    num_row_tiles = (NUM_OUTPUTS + WIDTH - 1) // WIDTH
    num_token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    counts = (num_row_tiles, num_token_tiles, num_row_tiles * num_token_tiles)
    BYTES: gl.constexpr = weight.block_shape[len(weight.block_shape) - 1]
    packed: gl.constexpr = gl.NVMMASharedLayout(BYTES, 8, rank=2)
    weights = gl.allocate_shared_memory(weight.dtype, [SLOTS * GROUPS, _ROWS, BYTES], packed)
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS, TOKENS, _COLUMNS], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    fence_async_shared()
    ring = (weights, xs, full, empty)
    results = (bias_ptr, output_ptr)
    work = (weight, x, ring, (scale_ptr, zero_ptr), results, num_tokens, counts)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, GATED, SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT)),
                (_load, (work, NUM_INPUTS, DEPENDENT)),
            ],
            [1],
            [LOAD_REGISTERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, GATED, SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT)),
                (_multiply, (work, 1, GATED, SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT)),
                (_load, (work, NUM_INPUTS, DEPENDENT)),
            ],
            [4, 1],
            [GROUP_REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_multiply, (work, 0, GATED, SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT)),
                (_multiply, (work, 1, GATED, SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT)),
                (_multiply, (work, 2, GATED, SCALE_COLUMNS, NUM_OUTPUTS, NUM_INPUTS, DEPENDENT)),
                (_load, (work, NUM_INPUTS, DEPENDENT)),
            ],
            [4, 4, 1],
            [GROUP_REGISTERS, GROUP_REGISTERS, LOAD_REGISTERS],
        )


def packed_wide_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: PackedTiles,
    *,
    weight_scale: torch.Tensor,
    weight_zero: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """Computes models.ops.products.packed_linear.packed_linear for any number of tokens.

    x [T, K] is contiguous bfloat16, weight in kernel order; with a gate it has 2 * N rows, and N is
    a multiple of 8.
    """
    num_tokens, num_inputs = x.shape
    num_rows = weight.shape[0]
    num_outputs = num_rows // (2 if is_gated else 1)
    output = x.new_empty(num_tokens, num_outputs)
    scale_columns, weight_scale = scale_operand(weight, weight_scale)
    launch = _launcher(num_outputs, num_inputs, scale_columns, is_gated, tiles, x.device)
    most = num_multiprocessors(x.device) * tiles.programs
    launch(
        (min(most, num_tiles(tiles, num_tokens, num_rows)), 1, 1),
        described_rows(weight, PACKED_COLUMNS * bits_of(weight) // 8, is_gated=is_gated),
        TensorDescriptor(x, [*x.shape], [num_inputs, 1], [tiles.tokens, PACKED_COLUMNS], _INPUTS),
        weight_scale, weight_zero, bias, output, num_tokens,
    )  # fmt: skip
    return output


@lru_cache
def _launcher(
    num_outputs: int,
    num_inputs: int,
    scale_columns: int,
    is_gated: bool,
    tiles: PackedTiles,
    device: torch.device,
) -> Launch:
    programs = tiles.groups, tiles.programs
    return Launch(
        _packed_wide_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs,
        SCALE_COLUMNS=scale_columns, GROUPS=tiles.groups, TOKENS=tiles.tokens, SLOTS=tiles.slots,
        GATED=is_gated, GROUP_REGISTERS=_GROUP_REGISTERS[programs],
        LOAD_REGISTERS=_LOAD_REGISTERS, num_warps=4, maxnreg=_MOST_REGISTERS[programs],
        **launch_options(device),
    )  # fmt: skip
