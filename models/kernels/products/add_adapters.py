"""Low-rank adapters of a product, of all tokens and adapters of a step in two kernels.

Programs have a tile of neighbouring tokens. In decodes each token may have its own adapter: a tile
has several lanes, programs that share its adapters, and the first token of each adapter chooses the
lane. A lane reads the weights of an adapter once for all of its tokens in the tile. Tokens of a
prompt share one adapter, and tiles of many tokens have one lane. No list of tokens by adapter is
made, so captured graphs need no other input than the slots.

The first kernel needs nothing of the product: before it, it runs while the product's first weights
load. Programs read weights before the kernels ahead of them have ended; see dependent_launch.

Source of the grouping: Chen et al. 2023, "Punica", section 4; ours has no segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch

MAX_PARTS = 4
"""Most projections of one layer."""
_SMALLEST_DOT = 16
"""Least rows and columns of a tile that tensor cores multiply."""
_FEW_TOKENS = 64
"""Steps of up to this many tokens have small tiles and many lanes."""
_MOST_SPREAD_TOKENS = 256
"""Steps of up to this many tokens have tiles with several lanes."""
_LANES = 16
_LANES_OF_LARGE_TILES = 4
_COLUMNS = 64
"""Inputs that a step of the first kernel's loop multiplies, with many tokens or wide elements."""
_WHOLE_COLUMNS = 512
"""Most inputs that the first kernel multiplies at once, with few tokens."""
_LEAST_COLUMNS = 256
"""Least inputs of a program of the first kernel, if there are as many."""
_TILE_OF_B = 2048
"""Elements of B that a program of the second kernel loads at once, with few tokens."""
_MOST_SPLITS = 24
"""Programs of the first kernel that share the inputs of few tokens."""
_MOST_SUMS = 1024
"""Sums of a token that the second kernel adds up, at most, if there are more splits than one."""


@triton.jit
def _place_of(num_tokens, BLOCK_M: tl.constexpr, IS_SPREAD: tl.constexpr):
    """Returns this program's tile of tokens and its lane."""
    tile = tl.program_id(0)
    lane, lanes = 0, 1
    if IS_SPREAD:
        lanes = tl.num_programs(0) // tl.cdiv(num_tokens, BLOCK_M)
        tile, lane = tile // lanes, tile % lanes
    return tile, lane, lanes


@triton.jit
def _own_slots(slots, lane, lanes, IS_SPREAD: tl.constexpr):
    """Returns the slots of this lane, -1 elsewhere: those whose first token has its number."""
    if IS_SPREAD:
        each = tl.arange(0, slots.shape[0])
        is_earlier = each[None, :] < each[:, None]
        is_repeat = is_earlier & (slots[None, :] == slots[:, None])
        is_first = tl.max(is_repeat.to(tl.int32), axis=1) == 0
        slots = tl.where(is_first & (each % lanes == lane), slots, -1)
    return slots


@triton.jit
def _load_a(a_ptr, slot, columns, inputs, end, N: tl.constexpr, K: tl.constexpr):
    """Loads [inputs, columns] of a slot's A; zeros from input `end` on, and without an adapter."""
    is_wanted = (slot > 0) & (columns < N)[None, :] & (inputs < end)[:, None]
    matrix_ptr = a_ptr + (slot - 1).to(tl.int64) * N * K
    return tl.load(matrix_ptr + columns[None, :] * K + inputs[:, None], mask=is_wanted, other=0.0)


@triton.jit
def _load_x(x_ptr, rows, is_own, inputs, end, K: tl.constexpr):
    is_wanted = is_own[:, None] & (inputs < end)[None, :]
    return tl.load(x_ptr + rows[:, None] * K + inputs[None, :], mask=is_wanted, other=0.0)


# Steps have any number of tokens, and each kind of number would be a build.
@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x_ptr, a_ptr, slots_ptr, inner_ptr, num_tokens,
    K: tl.constexpr, N: tl.constexpr, PER_SPLIT: tl.constexpr, IS_SPREAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes x @ A^T of a share of the K inputs, inner [splits, tokens, N], for tokens in slots.

    A program computes BLOCK_N of N = parts * R rows of A for a lane's tokens. A share of BLOCK_K
    inputs loads its A before the inputs are ready.
    """
    let_next_start(DEPENDENT)
    tile, lane, lanes = _place_of(num_tokens, BLOCK_M, IS_SPREAD)
    tokens = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    own = _own_slots(slots, lane, lanes, IS_SPREAD)
    rows = tokens.to(tl.int64)
    first = split * PER_SPLIT
    end = tl.minimum(first + PER_SPLIT, K)
    inputs = first + tl.arange(0, BLOCK_K)
    slot = tl.max(own, axis=0)
    IS_WHOLE: tl.constexpr = PER_SPLIT == BLOCK_K
    if IS_WHOLE:
        a = _load_a(a_ptr, slot, columns, inputs, end, N, K)
    is_first_program = tl.program_id(0) + tl.program_id(1) + split == 0
    if (slot > 0) | is_first_program:
        wait_for_previous(DEPENDENT)
    while slot > 0:
        is_own = slots == slot
        if IS_WHOLE:
            x = _load_x(x_ptr, rows, is_own, inputs, end, K)
            total = tl.dot(x, a, input_precision="ieee")
        else:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(first, end, BLOCK_K):
                tile_inputs = start + tl.arange(0, BLOCK_K)
                tile_x = _load_x(x_ptr, rows, is_own, tile_inputs, end, K)
                tile_a = _load_a(a_ptr, slot, columns, tile_inputs, end, N, K)
                total = tl.dot(tile_x, tile_a, total, input_precision="ieee")
        target = inner_ptr + (split * num_tokens + rows[:, None]) * N + columns[None, :]
        tl.store(target, total, mask=is_own[:, None] & (columns < N)[None, :])
        slot = tl.max(tl.where(own < slot, own, -1), axis=0)
        if IS_WHOLE:
            a = _load_a(a_ptr, slot, columns, inputs, end, N, K)


@triton.jit
def _load_b(b_ptr, slot, columns, is_output, ranks, N: tl.constexpr, RANK: tl.constexpr):
    """Loads [ranks, columns] of a slot's B; zeros without an adapter."""
    is_wanted = (slot > 0) & is_output[None, :] & (ranks < RANK)[:, None]
    row = (slot - 1).to(tl.int64) * N + columns[None, :]
    return tl.load(b_ptr + row * RANK + ranks[:, None], mask=is_wanted, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    product_ptr, inner_ptr, b_ptr, slots_ptr, output_ptr, num_tokens,
    N: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, IS_SPREAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes product + inner @ B^T, of a lane's tokens and BLOCK_N outputs of one part.

    Tokens without an adapter are a slot like others, whose product is copied. N0 to N2: outputs of
    the first parts; a fourth has the rest. SPLITS sums make an inner value.
    """
    let_next_start(DEPENDENT)
    token_tile, lane, lanes = _place_of(num_tokens, BLOCK_M, IS_SPREAD)
    tokens = token_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tile, part, first, size = tl.program_id(1), 0, 0, N0
    if tile >= tl.cdiv(N0, BLOCK_N):
        tile, part, first, size = tile - tl.cdiv(N0, BLOCK_N), 1, N0, N1
        if tile >= tl.cdiv(N1, BLOCK_N):
            tile, part, first, size = tile - tl.cdiv(N1, BLOCK_N), 2, N0 + N1, N2
            if tile >= tl.cdiv(N2, BLOCK_N):
                tile, part = tile - tl.cdiv(N2, BLOCK_N), 3
                first, size = N0 + N1 + N2, N - N0 - N1 - N2
    in_part = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output, columns = in_part < size, first + in_part
    ranks = tl.arange(0, BLOCK_R)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    own = _own_slots(slots, lane, lanes, IS_SPREAD)
    rows = tokens.to(tl.int64)
    slot = tl.max(own, axis=0)
    b = _load_b(b_ptr, slot, columns, is_output, ranks, N, RANK)
    # A step has a token, and its program is not idle.
    if slot >= 0:
        wait_for_previous(DEPENDENT)
    while slot >= 0:
        is_own = slots == slot
        is_entry = is_own[:, None] & is_output[None, :]
        at_entry = rows[:, None] * N + columns[None, :]
        product = tl.load(product_ptr + at_entry, mask=is_entry, other=0.0)
        has_sum = (slot > 0) & is_own[:, None] & (ranks < RANK)[None, :]
        inner = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLITS):
            source = inner_ptr + (split * num_tokens + rows[:, None]) * (PARTS * RANK)
            inner += tl.load(source + part * RANK + ranks[None, :], mask=has_sum, other=0.0)
        added = tl.dot(inner.to(b.dtype), b, input_precision="ieee")
        sums = (product.to(tl.float32) + added).to(product.dtype)
        tl.store(output_ptr + at_entry, sums, mask=is_entry)
        slot = tl.max(tl.where(own < slot, own, -1), axis=0)
        b = _load_b(b_ptr, slot, columns, is_output, ranks, N, RANK)


def shrink_adapters(x: torch.Tensor, adapter_a: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns sums whose sum over the first dimension is x @ A^T, [num_splits, T, N] float32.

    Steps of many tokens use the first alone.
    """
    num_tokens, num_inputs = x.shape
    num_inner = adapter_a.shape[1]
    x = x.contiguous()
    shape = num_splits(num_inputs, num_inner), num_tokens, num_inner
    inner = x.new_empty(shape, dtype=torch.float32)
    if num_tokens:
        form = _shrink_form(num_inputs, num_inner, x.dtype, x.device, _tiling(num_tokens))
        form.launch(form.grid(num_tokens), x, adapter_a, slots, inner, num_tokens)
    return inner


def expand_adapters(
    product: torch.Tensor,
    inner: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Returns [T, N]; see models.ops.products.add_adapters."""
    product = product.contiguous()
    output = torch.empty(product.shape, dtype=product.dtype, device=product.device)
    num_tokens, rank = product.shape[0], adapter_b.shape[2]
    if num_tokens:
        # Large ranks would need more shared memory and registers than a program has.
        tiling = _tiling(num_tokens, large_tile=64 if rank < 128 else 32)
        form = _expand_form(len(inner), rank, tuple(part_sizes), product.device, tiling)
        form.launch(form.grid(num_tokens), product, inner, adapter_b, slots, output, num_tokens)
    return output


def num_splits(num_inputs: int, num_inner: int) -> int:
    """Returns the programs of the first kernel that share the inputs of few tokens."""
    return triton.cdiv(num_inputs, _inputs_of_split(num_inputs, num_inner))


def _inputs_of_split(num_inputs: int, num_inner: int) -> int:
    """Returns a power of two. With many rows of A there are enough programs without splits."""
    splits = max(1, min(_MOST_SPLITS, _MOST_SUMS // num_inner))
    share = max(triton.cdiv(num_inputs, splits), min(_LEAST_COLUMNS, num_inputs), _SMALLEST_DOT)
    return triton.next_power_of_2(share)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How the tokens of a step are divided; is_small: their inputs are split, too."""

    tokens: int
    lanes: int
    is_small: bool


def _tiling(num_tokens: int, large_tile: int = 64) -> _Tiling:
    if num_tokens <= _FEW_TOKENS:
        tile = _SMALLEST_DOT if num_tokens <= _SMALLEST_DOT else 2 * _SMALLEST_DOT
        return _Tiling(tile, _LANES, is_small=True)
    lanes = _LANES_OF_LARGE_TILES if num_tokens <= _MOST_SPREAD_TOKENS else 1
    return _Tiling(large_tile, lanes, is_small=False)


@dataclass(frozen=True, slots=True)
class _Form:
    """A kernel for layers of some sizes, with its tiles."""

    launch: Launch
    tiling: _Tiling
    tiles: int
    splits: int = 1

    def grid(self, num_tokens: int) -> tuple[int, int, int]:
        """Returns the programs of a step."""
        lanes = min(self.tiling.lanes, num_tokens)
        return triton.cdiv(num_tokens, self.tiling.tokens) * lanes, self.tiles, self.splits


@lru_cache
def _shrink_form(
    num_inputs: int, num_inner: int, dtype: torch.dtype, device: torch.device, tiling: _Tiling
) -> _Form:
    most = 32 if tiling.is_small else 64
    tile = min(most, max(_SMALLEST_DOT, triton.next_power_of_2(num_inner)))
    per_split, columns = triton.next_power_of_2(num_inputs), _COLUMNS
    if tiling.is_small:
        per_split = _inputs_of_split(num_inputs, num_inner)
        if dtype.itemsize <= 2:  # wider products of tensor cores are made of many instructions
            columns = min(per_split, _WHOLE_COLUMNS)
    launch = Launch(
        _shrink_kernel, K=num_inputs, N=num_inner, PER_SPLIT=per_split,
        IS_SPREAD=tiling.lanes > 1, BLOCK_M=tiling.tokens, BLOCK_N=tile, BLOCK_K=columns,
        num_warps=4, num_stages=3, **launch_options(device),
    )  # fmt: skip
    return _Form(launch, tiling, triton.cdiv(num_inner, tile), triton.cdiv(num_inputs, per_split))


@lru_cache
def _expand_form(
    num_sums: int, rank: int, part_sizes: tuple[int, ...], device: torch.device, tiling: _Tiling
) -> _Form:
    assert len(part_sizes) <= MAX_PARTS, "no layer has more projections"
    block_r = max(_SMALLEST_DOT, triton.next_power_of_2(rank))
    tile = min(256, max(32, _TILE_OF_B // block_r)) if tiling.is_small else tiling.tokens
    firsts = (*part_sizes, 0, 0, 0)[:3]
    launch = Launch(
        _expand_kernel, N=sum(part_sizes), N0=firsts[0], N1=firsts[1], N2=firsts[2],
        PARTS=len(part_sizes), RANK=rank, SPLITS=num_sums if tiling.is_small else 1,
        IS_SPREAD=tiling.lanes > 1, BLOCK_M=tiling.tokens, BLOCK_N=tile, BLOCK_R=block_r,
        num_warps=4, num_stages=2, **launch_options(device),
    )  # fmt: skip
    return _Form(launch, tiling, sum(triton.cdiv(size, tile) for size in part_sizes))
