"""Products of many tokens, for Hopper's tensor cores.

Each warp group of a program multiplies 64 rows of the weight with a tile of tokens: weights are the
left factor, as tensor cores need 64 rows there. The copy engine loads tiles of 64 inputs into a
ring of slots. The first group refills a slot once all groups have read it: with no warps reserved
for copies, three groups have registers for 256 tokens.
"""

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
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
from models.kernels.launching.gluon_names import load_box
from models.kernels.launching.launch import Launch
from models.kernels.products.row_tiles import (
    described_rows,
    gate_rows,
    load_rows,
    store_rows,
)
from models.kernels.products.tile_order import first_token_of, place_of
from models.kernels.tuning.tiles import GROUP_ROWS, WideTiles

_DEPTH = gl.constexpr(64)
"""Inputs of a tile: 128 bytes, the widest pattern that tensor cores read without conflicts."""
_MOST_TOKENS_OF_TWO = gl.constexpr(128)
"""Tokens of a tile up to which a thread has registers for the sums of two parts."""
_REGISTERS = {1: 0, 2: 248, 3: 168}
"""Registers of a thread by warp groups of a program; one group is not specialised."""
_SPLIT_REGISTERS = 144
"""The same of two groups whose sums are parts, which start with _SPLIT_MOST_REGISTERS."""
_SPLIT_MOST_REGISTERS = 128
"""Leaves room for a program of the next norm, which then starts before the product has ended."""
_MATRIX = gl.NVMMASharedLayout(128, 16, rank=2)


@gluon.jit
def _load_weight(weight, ring, slot, row_tile, depth):
    """Starts loading all groups' rows; if gated, a group alternates eight of the gate and of up."""
    weights, xs, full, _ = ring
    GROUPS: gl.constexpr = weights.shape[0] // xs.shape[0]
    mbarrier.expect(full.index(slot), (GROUPS * weights.shape[1] + xs.shape[1]) * _DEPTH * 2)
    for group in gl.static_range(GROUPS):
        target = weights.index(slot * GROUPS + group)
        row = (row_tile * GROUPS + group) * weights.shape[1]
        load_rows(weight, target, full.index(slot), row, depth)


@gluon.jit
def _load_tokens(x, ring, slot, token_tile, num_tokens, depth):
    _, xs, full, _ = ring
    place = [first_token_of(token_tile, xs.shape[1], num_tokens), depth]
    load_box(x, place, full.index(slot), xs.index(slot))


@gluon.jit
def _fill(work, SLOTS: gl.constexpr, DEPENDENT: gl.constexpr):
    """Starts loading the first slots; weights come before the wait, as no kernel writes them."""
    weight, x, ring, _, num_tokens, counts, first_depth, _ = work
    row_tile, token_tile = place_of(gl.program_id(0), counts)
    for slot in gl.static_range(SLOTS):
        _load_weight(weight, ring, slot, row_tile, first_depth + slot * _DEPTH)
    wait_for_previous(DEPENDENT)
    for slot in gl.static_range(SLOTS):
        _load_tokens(x, ring, slot, token_tile, num_tokens, first_depth + slot * _DEPTH)


@gluon.jit
def _refill(work, slot, phase, tile, step, STEPS: gl.constexpr):
    """Loads a step into a slot once all groups have read it; returns the next tile and step."""
    weight, x, ring, _, num_tokens, counts, first_depth, _ = work
    mbarrier.wait(ring[3].index(slot), phase)
    if tile < counts[2]:
        row_tile, token_tile = place_of(tile, counts)
        depth = first_depth + step * _DEPTH
        _load_weight(weight, ring, slot, row_tile, depth)
        _load_tokens(x, ring, slot, token_tile, num_tokens, depth)
    step += 1
    if step == STEPS:
        step = 0
        tile += gl.num_programs(0)
    return tile, step


@gluon.jit
def _store_part(sums, output_ptr, first_row, first_token, num_tokens, NUM_OUTPUTS: gl.constexpr):
    """Stores float32 [rows, tokens] to an output [T, N] in register order."""
    layout: gl.constexpr = sums.type.layout
    rows = first_row + gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
    tokens = first_token + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    in_output = (rows < NUM_OUTPUTS)[:, None] & (tokens < num_tokens)[None, :]
    output_ptr += gl.program_id(1).to(gl.int64) * num_tokens * NUM_OUTPUTS
    gl.store(output_ptr + tokens[None, :] * NUM_OUTPUTS + rows[:, None], sums, mask=in_output)


@gluon.jit
def _before(slot, phase, SLOTS: gl.constexpr):
    """Returns the slot before this one, and its phase."""
    is_first = slot == 0
    return gl.where(is_first, SLOTS - 1, slot - 1), gl.where(is_first, phase ^ 1, phase)


@gluon.jit
def _by_thread(sums):
    """Returns [64, TOKENS] sums as a vector in which each thread's elements are four in a row."""
    EIGHTS: gl.constexpr = sums.shape[1] // 8
    places = sums.reshape([4, 2, 8, EIGHTS, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return places.reshape([64 * sums.shape[1]])


@gluon.jit
def _by_row(sums, layout: gl.constexpr):
    """Undoes _by_thread."""
    EIGHTS: gl.constexpr = sums.shape[0] // 512
    places = sums.reshape([EIGHTS, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(places.reshape([64, EIGHTS * 8]), layout)


@gluon.jit
def _earlier_sums(sums, kept_ptr):
    """Returns where a group keeps the sums of earlier parts; each thread reads its own stores."""
    at = gl.arange(0, sums.shape[0], sums.type.layout)
    return kept_ptr + at


@gluon.jit
def _sum_part(
    work, layout: gl.constexpr, slot, phase, next_tile, next_step,
    GROUP: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Returns one group's sums over a part of its tile's steps, and the ring's new state."""
    weights, xs, full, empty = work[2]
    SLOTS: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    GROUPS: gl.constexpr = weights.shape[0] // SLOTS
    sums = gl.zeros([64, TOKENS], gl.float32, layout)
    for step in range(STEPS // PARTS):
        mbarrier.wait(full.index(slot), phase)
        rows = weights.index(slot * GROUPS + GROUP)
        sums = warpgroup_mma(rows, xs.index(slot).permute((1, 0)), sums, is_async=True)
        # This product may still run, but the one before it has read its slot.
        sums = warpgroup_mma_wait(1, deps=(sums,))
        last, last_phase = _before(slot, phase, SLOTS)
        mbarrier.arrive(empty.index(last), pred=step > 0)
        if GROUP == 0:  # noqa: SIM102  # a constant leaves the rest out, `and` would not
            if step > 0:
                next_tile, next_step = _refill(work, last, last_phase, next_tile, next_step, STEPS)
        slot += 1
        if slot == SLOTS:
            slot = 0
            phase ^= 1
    sums = warpgroup_mma_wait(0, deps=(sums,))
    last, last_phase = _before(slot, phase, SLOTS)
    mbarrier.arrive(empty.index(last))
    if GROUP == 0:
        next_tile, next_step = _refill(work, last, last_phase, next_tile, next_step, STEPS)
    return sums, slot, phase, next_tile, next_step


@gluon.jit
def _sum_parts(
    work, layout: gl.constexpr, slot, phase, next_tile, next_step,
    GROUP: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Returns _sum_part of all parts, each summed apart and added in order."""
    sums, slot, phase, next_tile, next_step = _sum_part(
        work, layout, slot, phase, next_tile, next_step, GROUP, STEPS, PARTS
    )
    if sums.shape[1] <= _MOST_TOKENS_OF_TWO:
        # Unrolled, four parts would not fit into the registers.
        for _part in range(1, PARTS):
            earlier = sums
            sums, slot, phase, next_tile, next_step = _sum_part(
                work, layout, slot, phase, next_tile, next_step, GROUP, STEPS, PARTS
            )
            sums += earlier
    elif PARTS > 1:
        GROUPS: gl.constexpr = work[2][0].shape[0] // work[2][1].shape[0]
        my_kept_ptr = work[7] + (gl.program_id(0) * GROUPS + GROUP) * 64 * sums.shape[1]
        for part in gl.static_range(1, PARTS):
            flat = _by_thread(sums)
            kept_ptrs = _earlier_sums(flat, my_kept_ptr)
            if part > 1:
                flat += gl.load(kept_ptrs)
            gl.store(kept_ptrs, flat)
            sums, slot, phase, next_tile, next_step = _sum_part(
                work, layout, slot, phase, next_tile, next_step, GROUP, STEPS, PARTS
            )
        flat = _by_thread(sums)
        sums = _by_row(flat + gl.load(_earlier_sums(flat, my_kept_ptr)), layout)
    return sums, slot, phase, next_tile, next_step


@gluon.jit
def _multiply(
    work, GROUP: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
    PARTS: gl.constexpr, ROUNDS: gl.constexpr, NUM_OUTPUTS: gl.constexpr,
):  # fmt: skip
    """Computes one group's rows of all of the program's tiles, in PARTS sums that it adds up."""
    _, _, ring, output_ptr, num_tokens, counts, _, _ = work
    weights, xs, _, _ = ring
    SLOTS: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    GROUPS: gl.constexpr = weights.shape[0] // SLOTS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    slot = 0
    phase = 0
    # The next load.
    next_tile = gl.program_id(0)
    next_step = SLOTS
    if SLOTS == STEPS:
        next_tile += gl.num_programs(0)
        next_step = 0
    for tile in range(gl.program_id(0), counts[2], gl.num_programs(0)):
        sums, slot, phase, next_tile, next_step = _sum_parts(
            work, layout, slot, phase, next_tile, next_step, GROUP, STEPS, PARTS
        )
        row_tile, token_tile = place_of(tile, counts)
        row = (row_tile * GROUPS + GROUP) * 64
        token = first_token_of(token_tile, TOKENS, num_tokens)
        if GATED:
            outputs = gate_rows(sums, output_ptr.dtype.element_ty, ROUNDS)
            store_rows(outputs, output_ptr, row // 2, token, num_tokens, NUM_OUTPUTS)
        elif SPLITS > 1:
            _store_part(sums, output_ptr, row, token, num_tokens, NUM_OUTPUTS)
        else:
            store_rows(sums, output_ptr, row, token, num_tokens, NUM_OUTPUTS)


@gluon.jit(do_not_specialize=["num_tokens"])
def _wide_kernel(
    weight, x, output_ptr, kept_ptr, num_tokens,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, GROUPS: gl.constexpr,
    TOKENS: gl.constexpr, SLOTS: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
    PARTS: gl.constexpr, ROUNDS: gl.constexpr, REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes tiles of all outputs, over the inputs of one split."""
    let_next_start(DEPENDENT)
    STEPS: gl.constexpr = (NUM_INPUTS + _DEPTH * SPLITS - 1) // (_DEPTH * SPLITS)
    gl.static_assert(STEPS % PARTS == 0, "parts have equally many steps")
    WIDTH: gl.constexpr = GROUPS * 64 // (2 if GATED else 1)
    num_row_tiles = (NUM_OUTPUTS + WIDTH - 1) // WIDTH
    num_token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    counts = (num_row_tiles, num_token_tiles, num_row_tiles * num_token_tiles)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    weights = gl.allocate_shared_memory(weight.dtype, [SLOTS * GROUPS, 64, _DEPTH], shared)
    xs = gl.allocate_shared_memory(x.dtype, [SLOTS, TOKENS, _DEPTH], shared)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    first_depth = gl.program_id(1) * STEPS * _DEPTH
    ring = (weights, xs, full, empty)
    work = (weight, x, ring, output_ptr, num_tokens, counts, first_depth, kept_ptr)
    _fill(work, SLOTS, DEPENDENT)
    if GROUPS == 1:
        _multiply(work, 0, STEPS, GATED, SPLITS, PARTS, ROUNDS, NUM_OUTPUTS)
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, STEPS, GATED, SPLITS, PARTS, ROUNDS, NUM_OUTPUTS)),
                (_multiply, (work, 1, STEPS, GATED, SPLITS, PARTS, ROUNDS, NUM_OUTPUTS)),
            ],
            [4],
            [REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, STEPS, GATED, SPLITS, PARTS, ROUNDS, NUM_OUTPUTS)),
                (_multiply, (work, 1, STEPS, GATED, SPLITS, PARTS, ROUNDS, NUM_OUTPUTS)),
                (_multiply, (work, 2, STEPS, GATED, SPLITS, PARTS, ROUNDS, NUM_OUTPUTS)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )


def wide_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: WideTiles,
    *,
    is_gated: bool = False,
    rounds: bool = False,
) -> torch.Tensor:
    """Computes a product of any number of tokens, gated or not.

    x [T, K] and weight are contiguous, of 16-bit floats, with K a multiple of 8, and N too if
    is_gated. A gated product has no splits.

    rounds: a gated product is rounded before the gate, like two operators.

    Returns:
        [T, N]; with tiles.splits > 1 its addends, [splits, T, N] float32.
    """
    num_tokens, num_inputs = x.shape
    num_outputs = weight.shape[0] // (2 if is_gated else 1)
    if tiles.splits == 1:
        output = x.new_empty(num_tokens, num_outputs)
    else:
        output = x.new_empty(tiles.splits, num_tokens, num_outputs, dtype=torch.float32)
    launch = _launcher(num_outputs, num_inputs, is_gated, rounds, tiles, x.device)
    most = num_multiprocessors(x.device) // tiles.splits
    num_programs = min(most, tiles.count(num_tokens, weight.shape[0]))
    kept = None
    if tiles.parts > 1 and tiles.tokens > _MOST_TOKENS_OF_TWO.value:
        sizes = (num_programs, tiles.groups, GROUP_ROWS, tiles.tokens)
        kept = torch.empty(sizes, dtype=torch.float32, device=x.device)
    launch(
        (num_programs, tiles.splits, 1),
        described_rows(weight, _DEPTH.value, is_gated=is_gated),
        TensorDescriptor(x, [*x.shape], [num_inputs, 1], [tiles.tokens, _DEPTH.value], _MATRIX),
        output, kept, num_tokens,
    )  # fmt: skip
    return output


@lru_cache
def _launcher(
    num_outputs: int,
    num_inputs: int,
    is_gated: bool,
    rounds: bool,
    tiles: WideTiles,
    device: torch.device,
) -> Launch:
    num_steps = -(-num_inputs // (_DEPTH.value * tiles.splits))
    registers, limit = _REGISTERS[tiles.groups], {}
    if tiles.groups == 2 and tiles.splits > 1:
        registers, limit = _SPLIT_REGISTERS, {"maxnreg": _SPLIT_MOST_REGISTERS}
    return Launch(
        _wide_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, GROUPS=tiles.groups,
        TOKENS=tiles.tokens, SLOTS=min(tiles.slots, num_steps), GATED=is_gated, SPLITS=tiles.splits,
        PARTS=tiles.parts, ROUNDS=rounds, REGISTERS=registers, num_warps=4, **limit,
        **launch_options(device),
    )  # fmt: skip
