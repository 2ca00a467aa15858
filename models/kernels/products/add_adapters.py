"""Low-rank adapters of a product, of all tokens and adapters of a step in two kernels.

Each program has a tile of neighbouring tokens and goes through the adapters among them, from the
last slot to the first. Tokens of a prompt share one; in decodes each token may have its own, whose
weights are read once for the tile. No list of tokens by adapter is made, so captured graphs need no
other input than the slots.

Source of the grouping: Chen et al. 2023, "Punica", section 4; ours has no segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.launch import Launch

MAX_PARTS = 4
"""Most projections of one layer."""
_SMALLEST_DOT = 16
"""Least rows and columns of a tile that tensor cores multiply."""
_FEW_TOKENS = 64
"""Steps of up to this many tokens have small tiles."""
_COLUMNS = 64
"""Inputs that a step of the first kernel's loop multiplies."""
_MAX_SPLITS = 8
"""Programs of the first kernel that share the inputs of few tokens."""


# Steps have any number of tokens, and each kind of number would be a build.
@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x_ptr, a_ptr, slots_ptr, inner_ptr, num_tokens,
    K: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, PER_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes x @ A^T of a share of the K inputs, inner [SPLITS, tokens, N], for tokens in slots.

    A program computes BLOCK_M tokens and BLOCK_N of N = parts * R rows of A.
    """
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    is_token = tokens < num_tokens
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=0)
    rows = tokens.to(tl.int64)
    slot = tl.max(slots, axis=0)
    while slot > 0:
        is_own = slots == slot
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        matrix_ptr = a_ptr + (slot - 1).to(tl.int64) * N * K
        for start in range(split * PER_SPLIT, tl.minimum((split + 1) * PER_SPLIT, K), BLOCK_K):
            inputs = start + tl.arange(0, BLOCK_K)
            is_input = (inputs < K) & (inputs < (split + 1) * PER_SPLIT)
            x = tl.load(
                x_ptr + rows[:, None] * K + inputs[None, :],
                mask=is_own[:, None] & is_input[None, :], other=0.0,
            )  # fmt: skip
            a = tl.load(
                matrix_ptr + columns[None, :] * K + inputs[:, None],
                mask=(columns < N)[None, :] & is_input[:, None], other=0.0,
            )  # fmt: skip
            total = tl.dot(x, a, total, input_precision="ieee")
        target = inner_ptr + (split * num_tokens + rows[:, None]) * N + columns[None, :]
        tl.store(target, total, mask=is_own[:, None] & (columns < N)[None, :])
        slot = tl.max(tl.where(slots < slot, slots, 0), axis=0)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    product_ptr, inner_ptr, b_ptr, slots_ptr, output_ptr, num_tokens,
    N: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Writes product + inner @ B^T, of BLOCK_M tokens and BLOCK_N outputs of one part.

    N0 to N2: outputs of the first parts; a fourth has the rest. SPLITS sums make an inner value.
    """
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile, part, first, size = tl.program_id(1), 0, 0, N0
    if tile >= tl.cdiv(N0, BLOCK_N):
        tile, part, first, size = tile - tl.cdiv(N0, BLOCK_N), 1, N0, N1
        if tile >= tl.cdiv(N1, BLOCK_N):
            tile, part, first, size = tile - tl.cdiv(N1, BLOCK_N), 2, N0 + N1, N2
            if tile >= tl.cdiv(N2, BLOCK_N):
                tile, part = tile - tl.cdiv(N2, BLOCK_N), 3
                first, size = N0 + N1 + N2, N - N0 - N1 - N2
    own = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output, columns = own < size, first + own
    ranks = tl.arange(0, BLOCK_R)
    is_token = tokens < num_tokens
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=0)
    rows = tokens.to(tl.int64)
    is_entry = is_token[:, None] & is_output[None, :]
    product = tl.load(product_ptr + rows[:, None] * N + columns[None, :], mask=is_entry, other=0.0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    slot = tl.max(slots, axis=0)
    while slot > 0:
        is_own = (slots == slot)[:, None] & (ranks < RANK)[None, :]
        inner = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLITS):
            source = inner_ptr + (split * num_tokens + rows[:, None]) * (PARTS * RANK)
            inner += tl.load(source + part * RANK + ranks[None, :], mask=is_own, other=0.0)
        b = tl.load(
            b_ptr + ((slot - 1).to(tl.int64) * N + columns[None, :]) * RANK + ranks[:, None],
            mask=is_output[None, :] & (ranks < RANK)[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(inner.to(b.dtype), b, total, input_precision="ieee")
        slot = tl.max(tl.where(slots < slot, slots, 0), axis=0)
    sums = (product.to(tl.float32) + total).to(product.dtype)
    tl.store(output_ptr + rows[:, None] * N + columns[None, :], sums, mask=is_entry)


def add_adapters(
    product: torch.Tensor,
    x: torch.Tensor,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Returns [T, N]; see models.ops.products.add_adapters."""
    num_tokens, num_inputs = x.shape
    x, product = x.contiguous(), product.contiguous()
    output = torch.empty(product.shape, dtype=product.dtype, device=product.device)
    num_inner, rank = adapter_a.shape[1], adapter_b.shape[2]
    form = _form(
        num_inputs, num_inner, rank, tuple(part_sizes), x.device,
        has_few_tokens=num_tokens <= _FEW_TOKENS,
    )  # fmt: skip
    num_tiles = triton.cdiv(num_tokens, form.tile_tokens)
    inner = x.new_empty(form.num_splits, num_tokens, num_inner, dtype=torch.float32)
    form.shrink(
        (num_tiles, form.inner_tiles, form.num_splits),
        x, adapter_a, slots, inner, num_tokens,
    )  # fmt: skip
    form.expand(
        (num_tiles, form.output_tiles, 1),
        product, inner, adapter_b, slots, output, num_tokens,
    )  # fmt: skip
    return output


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """Both kernels for layers of some sizes, with their tiles."""

    shrink: Launch
    expand: Launch
    tile_tokens: int
    inner_tiles: int
    output_tiles: int
    num_splits: int


@lru_cache
def _form(
    num_inputs: int,
    num_inner: int,
    rank: int,
    part_sizes: tuple[int, ...],
    device: torch.device,
    *,
    has_few_tokens: bool,
) -> _Form:
    assert len(part_sizes) <= MAX_PARTS, "no layer has more projections"
    # Large ranks would need more shared memory and registers than a program has.
    most_rows = 64 if rank < 128 else 32
    tile_tokens = _SMALLEST_DOT if has_few_tokens else most_rows
    tile_inner = min(64, max(_SMALLEST_DOT, triton.next_power_of_2(num_inner)))
    inner_tiles = triton.cdiv(num_inner, tile_inner)
    # Few programs would leave most of the device idle while each reads all inputs.
    splits = min(_MAX_SPLITS, triton.cdiv(num_inputs, 4 * _COLUMNS)) if has_few_tokens else 1
    per_split = _COLUMNS * triton.cdiv(num_inputs, splits * _COLUMNS)
    num_splits = triton.cdiv(num_inputs, per_split)
    firsts = (*part_sizes, 0, 0, 0)[:3]
    return _Form(
        shrink=Launch(
            _shrink_kernel, K=num_inputs, N=num_inner, SPLITS=num_splits, PER_SPLIT=per_split,
            BLOCK_M=tile_tokens, BLOCK_N=tile_inner, BLOCK_K=_COLUMNS, num_warps=4, num_stages=3,
        ),
        expand=Launch(
            _expand_kernel, N=sum(part_sizes), N0=firsts[0], N1=firsts[1], N2=firsts[2],
            PARTS=len(part_sizes), RANK=rank, SPLITS=num_splits, BLOCK_M=tile_tokens,
            BLOCK_N=most_rows, BLOCK_R=max(_SMALLEST_DOT, triton.next_power_of_2(rank)),
            num_warps=4, num_stages=2,
        ),
        tile_tokens=tile_tokens,
        inner_tiles=inner_tiles,
        output_tiles=sum(triton.cdiv(size, most_rows) for size in part_sizes),
        num_splits=num_splits,
    )  # fmt: skip
