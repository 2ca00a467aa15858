"""Low-rank adapters of a product, of all tokens and adapters of a step in two kernels.

Programs have a tile of neighbouring tokens. In decodes each token may have its own adapter. The
first kernel reads few rows of an adapter: a tile has several lanes, programs that share its
adapters, and the first token of each adapter chooses the lane. The second one multiplies with
several adapters at once: the values of a token are in the columns of its adapter, with zeros in the
others. So each reads the weights of an adapter once for a tile. No list of tokens by adapter is
made, and captured graphs need no other input than the slots.

Programs read weights and slots before the kernels ahead of them have ended; see dependent_launch.

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
_MOST_SPLIT_TOKENS = 512
"""Steps of up to this many tokens have several lanes, and split the inputs."""
_LANES = 16
_COLUMNS = 64
"""Inputs that a step of the first kernel's loop multiplies."""
_CHUNK = 256
"""Inputs that the first kernel multiplies at once, where it has no loop."""
_MOST_CHUNKS = 4
"""Chunks of a program, whose A is in registers before the inputs are ready."""
_USUAL_SPLITS = 8
"""Programs of the first kernel that share the inputs, unless they would have too many chunks."""
_MOST_SUMS = 1024
"""Sums of a token that the second kernel adds up, at most, if the inputs are split."""
_TOGETHER = 256
"""Columns of adapters that the second kernel multiplies at once for tiles of few tokens."""
_GATED_TOGETHER = 64
"""The same with a gate, and for tiles of more tokens: more would leave a multiprocessor room for
one program, and 32 tokens of Qwen3-8B's first feed-forward product took 18 us longer (H200).
"""


@triton.jit
def _find_firsts(slots):
    """Returns which tokens are the first ones of their slots, and have an adapter."""
    each = tl.arange(0, slots.shape[0])
    is_earlier = each[None, :] < each[:, None]
    is_repeat = is_earlier & (slots[None, :] == slots[:, None])
    return (tl.max(is_repeat.to(tl.int32), axis=1) == 0) & (slots > 0)


@triton.jit
def _load_a(a_ptr, slot, columns, inputs, end, N: tl.constexpr, K: tl.constexpr):
    """Loads [inputs, columns] of a slot's A; zeros from input `end` on, and without an adapter."""
    is_wanted = (slot > 0) & (columns < N)[None, :] & (inputs < end)[:, None]
    matrix_ptr = a_ptr + (slot - 1).to(tl.int64) * N * K
    return tl.load(matrix_ptr + columns[None, :] * K + inputs[:, None], mask=is_wanted, other=0.0)


@triton.jit
def _load_chunks(
    a_ptr, slot, columns, inputs, end, N: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr
):
    """Loads four chunks of A; the last ones are those before them if there are fewer."""
    a = _load_a(a_ptr, slot, columns, inputs, end, N, K)
    second, third, fourth = a, a, a
    if CHUNKS > 1:
        second = _load_a(a_ptr, slot, columns, inputs + inputs.shape[0], end, N, K)
    if CHUNKS > 2:
        third = _load_a(a_ptr, slot, columns, inputs + 2 * inputs.shape[0], end, N, K)
    if CHUNKS > 3:
        fourth = _load_a(a_ptr, slot, columns, inputs + 3 * inputs.shape[0], end, N, K)
    return a, second, third, fourth


@triton.jit
def _load_x(x_ptr, rows, is_own, inputs, end, K: tl.constexpr):
    is_wanted = is_own[:, None] & (inputs < end)[None, :]
    # Past the first-level cache, which may have what was there before; see LATE.
    return tl.load(
        x_ptr + rows[:, None] * K + inputs[None, :], mask=is_wanted, other=0.0, cache_modifier=".cg"
    )


@triton.jit
def _multiply_chunks(
    x_ptr, rows, is_own, inputs, end, chunks, K: tl.constexpr, CHUNKS: tl.constexpr
):
    """Returns the products of chunks of a share's inputs and of A, added up."""
    x = _load_x(x_ptr, rows, is_own, inputs, end, K)
    total = tl.dot(x, chunks[0], input_precision="ieee")
    for chunk in tl.static_range(1, CHUNKS):
        x = _load_x(x_ptr, rows, is_own, inputs + chunk * inputs.shape[0], end, K)
        total = tl.dot(x, chunks[chunk], total, input_precision="ieee")
    return total


# Steps have any number of tokens, and each kind of number would be a build.
@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(  # noqa: C901  # constants choose the branches
    x_ptr, a_ptr, slots_ptr, inner_ptr, num_tokens,
    K: tl.constexpr, N: tl.constexpr, PER_SPLIT: tl.constexpr, CHUNKS: tl.constexpr,
    IS_SPREAD: tl.constexpr, IS_BESIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes x @ A^T of a share of the K inputs, inner [splits, tokens, N], for tokens in slots.

    A program computes BLOCK_N of N = parts * R rows of A for a lane's tokens. A share is CHUNKS of
    BLOCK_K inputs, or with none a loop over BLOCK_K. With IS_BESIDE the inputs are there, as the
    kernel before this one is LATE.
    """
    let_next_start(DEPENDENT)
    tile = tl.program_id(0)
    lane, lanes = 0, 1
    if IS_SPREAD:
        lanes = tl.num_programs(0) // tl.cdiv(num_tokens, BLOCK_M)
        tile, lane = tile // lanes, tile % lanes
    tokens = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=0)
    own = slots
    if IS_SPREAD:
        is_own_lane = _find_firsts(slots) & (tl.arange(0, BLOCK_M) % lanes == lane)
        own = tl.where(is_own_lane, slots, 0)
    rows = tokens.to(tl.int64)
    first = split * PER_SPLIT
    end = tl.minimum(first + PER_SPLIT, K)
    inputs = first + tl.arange(0, BLOCK_K)
    slot = tl.max(own, axis=0)
    if CHUNKS > 0:
        a, a1, a2, a3 = _load_chunks(a_ptr, slot, columns, inputs, end, N, K, CHUNKS)
    # Idle programs return, but some program of every kernel waits.
    is_first_program = tl.program_id(0) + tl.program_id(1) + split == 0
    if not IS_BESIDE:  # noqa: SIM102  # a constant leaves the rest out, `and` would not
        if (slot > 0) | is_first_program:
            wait_for_previous(DEPENDENT)
    while slot > 0:
        is_own = slots == slot
        if CHUNKS > 0:
            total = _multiply_chunks(x_ptr, rows, is_own, inputs, end, (a, a1, a2, a3), K, CHUNKS)
        else:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(first, end, BLOCK_K):
                tile_inputs = start + tl.arange(0, BLOCK_K)
                tile_x = _load_x(x_ptr, rows, is_own, tile_inputs, end, K)
                tile_a = _load_a(a_ptr, slot, columns, tile_inputs, end, N, K)
                total = tl.dot(tile_x, tile_a, total, input_precision="ieee")
        target = inner_ptr + (split * num_tokens + rows[:, None]) * N + columns[None, :]
        tl.store(target, total, mask=is_own[:, None] & (columns < N)[None, :])
        slot = tl.max(tl.where(own < slot, own, 0), axis=0)
        if CHUNKS > 0:
            a, a1, a2, a3 = _load_chunks(a_ptr, slot, columns, inputs, end, N, K, CHUNKS)
    if IS_BESIDE:  # noqa: SIM102  # as above
        if is_first_program:
            wait_for_previous(DEPENDENT)


@triton.jit
def _slots_from(slots, is_first, places, start, COUNT: tl.constexpr):
    """Returns COUNT distinct slots of a tile from place `start` on, 0 after the last."""
    wanted = start + tl.arange(0, COUNT)
    is_wanted = is_first[None, :] & (places[None, :] == wanted[:, None])
    return tl.sum(tl.where(is_wanted, slots[None, :], 0), axis=1)


@triton.jit
def _load_b(
    b_ptr, own_slots, columns, is_output, N: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Loads B of some slots, [slots * BLOCK_R, columns]; zeros without an adapter."""
    COUNT: tl.constexpr = own_slots.shape[0]
    each = tl.reshape(tl.broadcast_to(own_slots[:, None], (COUNT, BLOCK_R)), (COUNT * BLOCK_R,))
    ranks = tl.arange(0, COUNT * BLOCK_R) % BLOCK_R
    row = (each - 1).to(tl.int64)[:, None] * N + columns[None, :]
    is_wanted = ((each > 0) & (ranks < RANK))[:, None] & is_output[None, :]
    return tl.load(b_ptr + row * RANK + ranks[:, None], mask=is_wanted, other=0.0)


@triton.jit
def _load_inner(
    inner_ptr, slots, rows, part, num_tokens, PARTS: tl.constexpr, RANK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Returns the first kernel's sums of a part, [tokens, BLOCK_R]."""
    ranks = tl.arange(0, BLOCK_R)
    is_wanted = (slots > 0)[:, None] & (ranks < RANK)[None, :]
    inner = tl.zeros((slots.shape[0], BLOCK_R), tl.float32)
    for split in tl.static_range(SPLITS):
        source = inner_ptr + (split * num_tokens + rows[:, None]) * (PARTS * RANK)
        inner += tl.load(source + part * RANK + ranks[None, :], mask=is_wanted, other=0.0)
    return inner


@triton.jit
def _multiply(inner, slots, own_slots, b):
    """Returns inner @ B of some slots, [tokens, columns]; other tokens get zeros."""
    is_own = (slots[:, None] == own_slots[None, :]) & (own_slots > 0)[None, :]
    among = tl.where(is_own[:, :, None], inner[:, None, :], 0.0)
    factor = tl.reshape(among, (inner.shape[0], own_slots.shape[0] * inner.shape[1]))
    return tl.dot(factor.to(b.dtype), b, input_precision="ieee")


@triton.jit
def _load_product(product_ptr, at, is_entry, num_tokens, N: tl.constexpr, ADDENDS: tl.constexpr):
    product = tl.load(product_ptr + at, mask=is_entry, other=0.0).to(tl.float32)
    for addend in tl.static_range(1, ADDENDS):
        addend_ptr = product_ptr + (addend * num_tokens).to(tl.int64) * N
        product += tl.load(addend_ptr + at, mask=is_entry, other=0.0).to(tl.float32)
    return product


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    product_ptr, inner_ptr, b_ptr, slots_ptr, output_ptr, num_tokens,
    N: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, ADDENDS: tl.constexpr, SPLITS: tl.constexpr,
    IS_GATED: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes product + inner @ B^T, of BLOCK_M tokens and BLOCK_N outputs of one part.

    TOGETHER adapters are multiplied at once. N0 to N2: outputs of the first parts; a fourth has the
    rest. ADDENDS make a product, SPLITS sums an inner value. With IS_GATED a program has the same
    outputs of both parts, and writes silu(first) * second.
    """
    let_next_start(DEPENDENT)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
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
    is_token = tokens < num_tokens
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=0)
    is_first = _find_firsts(slots)
    places = tl.cumsum(is_first.to(tl.int32), axis=0) - 1
    num_slots = tl.sum(is_first.to(tl.int32), axis=0)
    own_slots = _slots_from(slots, is_first, places, 0, TOGETHER)
    b = _load_b(b_ptr, own_slots, columns, is_output, N, RANK, BLOCK_R)
    if IS_GATED:
        up_b = _load_b(b_ptr, own_slots, columns + N0, is_output, N, RANK, BLOCK_R)
    wait_for_previous(DEPENDENT)
    rows = tokens.to(tl.int64)
    is_entry = is_token[:, None] & is_output[None, :]
    at = rows[:, None] * N + columns[None, :]
    sums = _load_product(product_ptr, at, is_entry, num_tokens, N, ADDENDS)
    inner = _load_inner(inner_ptr, slots, rows, part, num_tokens, PARTS, RANK, SPLITS, BLOCK_R)
    sums += _multiply(inner, slots, own_slots, b)
    if IS_GATED:
        up = _load_product(product_ptr, at + N0, is_entry, num_tokens, N, ADDENDS)
        up_inner = _load_inner(inner_ptr, slots, rows, 1, num_tokens, PARTS, RANK, SPLITS, BLOCK_R)
        up += _multiply(up_inner, slots, own_slots, up_b)
    for start in range(TOGETHER, num_slots, TOGETHER):
        more_slots = _slots_from(slots, is_first, places, start, TOGETHER)
        more_b = _load_b(b_ptr, more_slots, columns, is_output, N, RANK, BLOCK_R)
        sums += _multiply(inner, slots, more_slots, more_b)
        if IS_GATED:
            more_up_b = _load_b(b_ptr, more_slots, columns + N0, is_output, N, RANK, BLOCK_R)
            up += _multiply(up_inner, slots, more_slots, more_up_b)
    if IS_GATED:
        sums = sums * tl.sigmoid(sums) * up
        at = rows[:, None] * N0 + columns[None, :]
    tl.store(output_ptr + at, sums.to(output_ptr.dtype.element_ty), mask=is_entry)


def add_adapters(
    product: torch.Tensor,
    x: torch.Tensor,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
    slots: torch.Tensor,
    *,
    is_gated: bool = False,
    is_beside: bool = False,
) -> torch.Tensor:
    """Returns [T, N] of adapter_b's dtype; see models.ops.products.add_adapters.

    product: [T, N], or its addends [S, T, N].
    slots: another kernel that takes no part in dependent launches follows the one that wrote them.
    is_gated: returns silu(first half) * second half, [T, N / 2], of two equal parts.
    is_beside: the kernel before these two was the product's, with x as it is here, and was late.
    """
    x, product = x.contiguous(), product.contiguous()
    (num_tokens, num_inputs), num_outputs = x.shape, product.shape[-1]
    num_inner, rank = adapter_a.shape[1], adapter_b.shape[2]
    output = adapter_b.new_empty(num_tokens, num_outputs // (2 if is_gated else 1))
    if not num_tokens:
        return output
    tiling = _tiling(num_tokens)
    shrink = _shrink_form(num_inputs, num_inner, x.dtype, x.device, tiling, is_beside=is_beside)
    expand = _expand_form(
        shrink.splits, rank, tuple(part_sizes), x.dtype, x.device, tiling,
        len(product) if product.dim() == 3 else 1, is_gated=is_gated,
    )  # fmt: skip
    inner = x.new_empty(shrink.splits, num_tokens, num_inner, dtype=torch.float32)
    shrink.launch(shrink.grid(num_tokens), x, adapter_a, slots, inner, num_tokens)
    expand.launch(expand.grid(num_tokens), product, inner, adapter_b, slots, output, num_tokens)
    return output


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a step is divided, by its tokens.

    shrunk, expanded: tokens of a tile of each kernel. lanes: of a tile of the first one. is_split:
    whether several programs share the inputs. is_single: whether there is one token.
    """

    shrunk: int
    expanded: int
    lanes: int
    is_split: bool
    is_single: bool = False


def _tiling(num_tokens: int) -> _Tiling:
    if num_tokens > _MOST_SPLIT_TOKENS:
        return _Tiling(64, 64, 1, is_split=False)
    if num_tokens <= _SMALLEST_DOT:
        return _Tiling(_SMALLEST_DOT, _SMALLEST_DOT, _LANES, True, num_tokens == 1)
    return _Tiling(32, 32 if num_tokens <= 64 else 64, _LANES, is_split=True)


@dataclass(frozen=True, slots=True)
class _Form:
    """A kernel for layers of some sizes, with its tiles."""

    launch: Launch
    tokens: int
    lanes: int
    tiles: int
    splits: int

    def grid(self, num_tokens: int) -> tuple[int, int, int]:
        """Returns the programs of a step."""
        lanes = min(self.lanes, num_tokens)
        return triton.cdiv(num_tokens, self.tokens) * lanes, self.tiles, self.splits


@lru_cache
def _shrink_form(
    num_inputs: int,
    num_inner: int,
    dtype: torch.dtype,
    device: torch.device,
    tiling: _Tiling,
    *,
    is_beside: bool,
) -> _Form:
    per_split, chunks, columns = num_inputs, 0, _COLUMNS
    tile = max(_SMALLEST_DOT, min(64, triton.next_power_of_2(num_inner)))
    if tiling.is_split:
        splits = max(1, min(_USUAL_SPLITS, _MOST_SUMS // num_inner))
        chunks = -(-num_inputs // (splits * _CHUNK))
        if num_inner * splits < _MOST_SUMS:
            chunks = min(chunks, _MOST_CHUNKS)
        per_split, tile = chunks * _CHUNK, _SMALLEST_DOT
        # Wider products of tensor cores are made of many instructions.
        if dtype.itemsize > 2 or chunks > _MOST_CHUNKS:
            chunks, tile = 0, 32
        else:
            columns = _CHUNK
    launch = Launch(
        _shrink_kernel, K=num_inputs, N=num_inner, PER_SPLIT=per_split, CHUNKS=chunks,
        IS_SPREAD=tiling.lanes > 1, IS_BESIDE=is_beside, BLOCK_M=tiling.shrunk, BLOCK_N=tile,
        BLOCK_K=columns, num_warps=8 if chunks > 2 else 4, num_stages=3, **launch_options(device),
    )  # fmt: skip
    tiles, splits = -(-num_inner // tile), -(-num_inputs // per_split)
    return _Form(launch, tiling.shrunk, tiling.lanes, tiles, splits)


@lru_cache
def _expand_form(
    num_splits: int,
    rank: int,
    part_sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    tiling: _Tiling,
    num_addends: int,
    *,
    is_gated: bool,
) -> _Form:
    assert len(part_sizes) <= MAX_PARTS, "no layer has more projections"
    block_r = max(_SMALLEST_DOT, triton.next_power_of_2(rank))
    # Prompts have few adapters in a tile. Wide products are made of many instructions.
    is_apart = tiling.is_single or not tiling.is_split or dtype.itemsize > 2
    # Large ranks would need more shared memory and registers than a program has.
    tokens = tiling.expanded if rank < 128 else min(32, tiling.expanded)
    columns = _GATED_TOGETHER if is_gated or tokens == 64 else _TOGETHER
    together = 1 if is_apart else max(1, columns // block_r)
    tile = 32 if rank >= 128 or (columns == _TOGETHER and not is_apart) else 64
    is_large = together * block_r >= _TOGETHER and block_r >= 64
    firsts = (*part_sizes, 0, 0, 0)[:3]
    launch = Launch(
        _expand_kernel, N=sum(part_sizes), N0=firsts[0], N1=firsts[1], N2=firsts[2],
        PARTS=len(part_sizes), RANK=rank, ADDENDS=num_addends, SPLITS=num_splits,
        IS_GATED=is_gated, TOGETHER=together, BLOCK_M=tokens, BLOCK_N=tile, BLOCK_R=block_r,
        num_warps=8 if is_large else 4, num_stages=2, **launch_options(device),
    )  # fmt: skip
    sizes = part_sizes[:1] if is_gated else part_sizes
    return _Form(launch, tokens, 1, sum(-(-size // tile) for size in sizes), 1)
