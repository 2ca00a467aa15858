"""Second kernel of adapters, product + (x @ A^T) @ B^T; see add_adapters."""

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
    AdapterForm,
    AdapterTiling,
    find_firsts,
    most_rows,
    rank_columns,
)

_MAX_PARTS = 4
"""Most projections of one layer."""
_TOGETHER = 256
"""Columns of adapters that the second kernel multiplies at once for tiles of few tokens."""
_GATED_TOGETHER = 64
"""Columns with a gate, and for tiles of more tokens: more would leave a multiprocessor room for
one program, and 32 tokens of Qwen3-8B's first feed-forward product took 18 us longer (H200).
"""


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
def _added(sums, inner, slots, own_slots, b):
    """Returns sums + inner @ B of some slots, [tokens, columns]; of other tokens the same bits."""
    is_own = (slots[:, None] == own_slots[None, :]) & (own_slots > 0)[None, :]
    among = tl.where(is_own[:, :, None], inner[:, None, :], 0.0)
    factor = tl.reshape(among, (inner.shape[0], own_slots.shape[0] * inner.shape[1]))
    product = tl.dot(factor.to(b.dtype), b, input_precision="ieee")
    return tl.where((slots > 0)[:, None], sums + product, sums)


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
    is_first = find_firsts(slots)
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
    sums = _added(sums, inner, slots, own_slots, b)
    if IS_GATED:
        up = _load_product(product_ptr, at + N0, is_entry, num_tokens, N, ADDENDS)
        up_inner = _load_inner(inner_ptr, slots, rows, 1, num_tokens, PARTS, RANK, SPLITS, BLOCK_R)
        up = _added(up, up_inner, slots, own_slots, up_b)
    for start in range(TOGETHER, num_slots, TOGETHER):
        more_slots = _slots_from(slots, is_first, places, start, TOGETHER)
        more_b = _load_b(b_ptr, more_slots, columns, is_output, N, RANK, BLOCK_R)
        sums = _added(sums, inner, slots, more_slots, more_b)
        if IS_GATED:
            more_up_b = _load_b(b_ptr, more_slots, columns + N0, is_output, N, RANK, BLOCK_R)
            up = _added(up, up_inner, slots, more_slots, more_up_b)
    if IS_GATED:
        sums = sums * tl.sigmoid(sums) * up
        at = rows[:, None] * N0 + columns[None, :]
    tl.store(output_ptr + at, sums.to(output_ptr.dtype.element_ty), mask=is_entry)


@lru_cache
def expand_form(
    num_splits: int,
    rank: int,
    part_sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    tiling: AdapterTiling,
    num_addends: int,
    *,
    is_gated: bool,
) -> AdapterForm:
    """Returns the second kernel for a layer.

    num_splits: shares of the inputs whose sums it adds up. num_addends: addends of a product.
    """
    assert len(part_sizes) <= _MAX_PARTS, "no layer has more projections"
    block_r = rank_columns(rank)
    # Wide products are made of many instructions.
    is_apart = tiling.is_apart or dtype.itemsize > 2
    tokens = min(most_rows(rank), tiling.expanded)
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
    return AdapterForm(launch, tokens, 1, sum(-(-size // tile) for size in sizes), 1)
