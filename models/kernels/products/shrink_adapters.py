"""First kernel of adapters, x @ A^T; see add_adapters."""

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
from models.kernels.products.adapter_tiles import (
    SMALLEST_DOT,
    AdapterForm,
    AdapterTiling,
    find_firsts,
    inner_columns,
)

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
        is_own_lane = find_firsts(slots) & (tl.arange(0, BLOCK_M) % lanes == lane)
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


@lru_cache
def shrink_form(
    num_inputs: int,
    num_inner: int,
    dtype: torch.dtype,
    device: torch.device,
    tiling: AdapterTiling,
    *,
    is_beside: bool,
) -> AdapterForm:
    """Returns the first kernel for a layer of num_inputs inputs and num_inner rows of A."""
    per_split, chunks, columns = num_inputs, 0, _COLUMNS
    tile = inner_columns(num_inner)
    if tiling.is_split:
        splits = max(1, min(_USUAL_SPLITS, _MOST_SUMS // num_inner))
        chunks = -(-num_inputs // (splits * _CHUNK))
        if num_inner * splits < _MOST_SUMS:
            chunks = min(chunks, _MOST_CHUNKS)
        per_split, tile = chunks * _CHUNK, SMALLEST_DOT
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
    return AdapterForm(launch, tiling.shrunk, tiling.lanes, tiles, splits)
