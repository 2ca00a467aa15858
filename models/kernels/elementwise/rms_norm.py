"""RMSNorm, with the residual sum before it and the rounding to FP8 after it in the same kernel."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.arithmetic.mean_square import mean_of, sums_integers, units_of
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.number_formats import BLOCK, FP8, FP8_MAX, SMALLEST_AMAX
from models.operands.token_scales import TOKEN_ALIGNMENT, empty_token_scales

_FP8_MAX = tl.constexpr(FP8_MAX)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_TOKEN_ALIGNMENT = tl.constexpr(TOKEN_ALIGNMENT)
_PART_REGISTERS = 64
"""Of a thread that adds parts, eight columns of each.

Left to itself the compiler uses 30 to 48 and adds each part before it loads the next. Up to 64 let
the loads of four parts run together: a layer of Qwen3-8B with FP8 weights took 1 to 4 us less with
8 to 256 tokens (H200, 2026-11). A thread of 16 columns would spill.
"""


@triton.jit
def store_rounded(
    normed, normed_ptr, scale_ptr, row, num_rows, is_column,
    SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores one row in FP8 and a scale for each GROUP columns, as empty_token_scales has them."""
    WIDTH: tl.constexpr = GROUP if GROUP < SIZE else BLOCK
    groups = tl.reshape(normed, (BLOCK // WIDTH, WIDTH))
    scale = tl.maximum(tl.max(tl.abs(groups), 1), _SMALLEST_AMAX) / _FP8_MAX
    scaled = tl.minimum(tl.maximum(groups / scale[:, None], -_FP8_MAX), _FP8_MAX)
    rounded = tl.reshape(scaled, (BLOCK,)).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * SIZE + tl.arange(0, BLOCK), rounded, mask=is_column)
    NUM_GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    group = tl.arange(0, BLOCK // WIDTH)
    stride = (num_rows + _TOKEN_ALIGNMENT - 1) // _TOKEN_ALIGNMENT * _TOKEN_ALIGNMENT
    tl.store(scale_ptr + group * stride + row, scale, mask=group < NUM_GROUPS)


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, scale_ptr, sum_ptr, eps,
    SIZE: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
    INTEGERS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalises one row, the sum of PARTS rows of x and, if HAS_RESIDUAL, one of the residual.

    Runs of HEADS adjacent rows of x begin every STRIDE elements. ROUNDS: the sum of several parts
    is rounded to the residual's dtype before it is added. INTEGERS: see mean_square. The norm is
    rounded to x's dtype and, unless scale_ptr is None, then to FP8 with a scale for each GROUP
    columns.
    """
    let_next_start(DEPENDENT)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    row = tl.program_id(0).to(tl.int64)
    at = row * SIZE + columns
    at_x = row // HEADS * STRIDE + row % HEADS * SIZE + columns
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    x = tl.load(x_ptr + at_x, mask=is_column, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=is_column, other=0.0)
        total = x.to(tl.float32)
        part_size = tl.num_programs(0).to(tl.int64) * SIZE
        for part in tl.static_range(1, PARTS):
            total += tl.load(x_ptr + part * part_size + at, mask=is_column, other=0.0)
        if PARTS > 1 and ROUNDS:
            total = total.to(residual.dtype).to(tl.float32)
        x = (total + residual.to(tl.float32)).to(residual.dtype)
        tl.store(sum_ptr + at, x, mask=is_column)
    x = x.to(tl.float32)
    if INTEGERS:
        largest = tl.max(x * x, 0)
        mean = mean_of(tl.sum(units_of(x * x, largest), 0), largest, SIZE)
    else:
        mean = tl.sum(x * x, 0) / SIZE
    scale = tl.rsqrt(mean + eps)
    if scale_ptr is None:
        dtype = normed_ptr.dtype.element_ty
        tl.store(normed_ptr + at, (x * scale * weight).to(dtype), mask=is_column)
    else:
        normed = (x * scale * weight).to(weight_ptr.dtype.element_ty).to(tl.float32)
        num_rows = tl.num_programs(0)
        store_rounded(normed, normed_ptr, scale_ptr, row, num_rows, is_column, SIZE, GROUP, BLOCK)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the normalised x, contiguous; see models.ops.elementwise.rms_norm.

    x may be a slice of wider rows, such as some of the heads of each token.
    """
    if not _is_slice(x):
        x = x.contiguous()
    normed = x.new_empty(x.shape)
    _launch(x, None, weight, eps, normed, normed)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, rounds: bool
) -> torch.Tensor:
    """Runs models.ops.elementwise.rms_norm.add_rms_norm; x and residual are contiguous.

    The sum may replace the residual: a thread reads the elements that it writes. rounds: a sum of
    addends is rounded to the residual's dtype first, as sum_parts does.
    """
    normed = torch.empty_like(residual)
    _launch(x, residual, weight, eps, normed, residual, rounds=rounds)
    return normed


def rounded_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, is_blocked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what fp8_linear.quantize makes of rms_norm(x), [T, K]: the values and their scales.

    is_blocked: whether each 128 features of a token have a scale, or the token has one.
    """
    x = x.contiguous()
    rounded, scale = _rounded_outputs(x.shape, x.device, is_blocked=is_blocked)
    _launch(x, None, weight, eps, rounded, rounded, scale)
    return rounded, scale


def add_rounded_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, is_blocked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual as add_rms_norm does; returns the norm as rounded_rms_norm does."""
    rounded, scale = _rounded_outputs(residual.shape, x.device, is_blocked=is_blocked)
    # FP8 numbers would enlarge the difference that a rounding less makes.
    _launch(x.contiguous(), residual, weight, eps, rounded, residual, scale, rounds=True)
    return rounded, scale


def _rounded_outputs(
    shape: torch.Size, device: torch.device, *, is_blocked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, size = shape
    num_groups = triton.cdiv(size, BLOCK) if is_blocked else 1
    scale = empty_token_scales(num_rows, num_groups, device)
    return torch.empty(shape, dtype=FP8, device=device), scale


def _is_slice(x: torch.Tensor) -> bool:
    """Returns whether x is [T, K] or [T, H, D] and each token's elements are contiguous."""
    if x.dim() == 2:
        return x.stride(1) == 1
    return x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor,
    total: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    rounds: bool = False,
) -> None:
    """Runs one program per row; with a residual x may be in parts and `total` takes the sum."""
    size = x.shape[-1]
    num_rows = normed.numel() // size
    heads, stride = 1, size
    if not x.is_contiguous():
        heads, stride = x.numel() // (len(x) * size), x.stride(0)
    num_parts = x.numel() // normed.numel()
    group = BLOCK if scale is not None and scale.shape[1] > 1 else size
    has_residual, rounds = residual is not None, rounds and num_parts > 1
    launch = _launcher(
        size, heads, stride, num_parts, has_residual, group, rounds, sums_integers(size), x.device
    )
    launch(
        (num_rows, 1, 1),
        x, x if residual is None else residual, weight, normed, scale, total, eps,
    )  # fmt: skip


@lru_cache
def _launcher(
    size: int,
    heads: int,
    stride: int,
    num_parts: int,
    has_residual: bool,
    group: int,
    rounds: bool,
    integers: bool,
    device: torch.device,
) -> Launch:
    block = triton.next_power_of_2(size)
    limit = {"maxnreg": _PART_REGISTERS} if num_parts > 1 and block <= 4096 else {}
    # A thread reads its eight elements at once: with few rows nothing hides a second read.
    return Launch(
        _rms_norm_kernel, SIZE=size, HEADS=heads, STRIDE=stride, PARTS=num_parts,
        HAS_RESIDUAL=has_residual, GROUP=group, BLOCK=block, ROUNDS=rounds,
        INTEGERS=integers, num_warps=min(16, max(1, block // 256)), **limit,
        **launch_options(device),
    )  # fmt: skip
