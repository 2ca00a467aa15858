"""Root-mean-square normalisation of groups of elements beside a gate."""

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

_ELEMENTS = 2048
"""Most elements of a program, unless a group has more."""


@triton.jit(do_not_specialize=["gate_stride"])
def _gated_rms_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, output_ptr, gate_stride, eps,
    NUM_GROUPS: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_SILU: tl.constexpr, GATES_FIRST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does GROUPS groups of a row. HAS_WEIGHTS: each group has weights of its own."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    element = tl.arange(0, BLOCK)[None, :]
    mask = (group < NUM_GROUPS) & (element < SIZE)
    column = group * SIZE + element
    weight_at = column if HAS_WEIGHTS else element + 0 * group
    weight = tl.load(weight_ptr + weight_at, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    x = tl.load(x_ptr + row * NUM_GROUPS * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate)
    if HAS_SILU:
        factor *= gate
    if GATES_FIRST:
        x *= factor
    scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / SIZE + eps)
    output = x * scale * weight
    if not GATES_FIRST:
        output *= factor
    at = row * NUM_GROUPS * SIZE + column
    tl.store(output_ptr + at, output.to(output_ptr.dtype.element_ty), mask=mask)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    has_silu: bool,
    gates_first: bool,
) -> torch.Tensor:
    """Maps x, [T, K] contiguous, and gate, [T, K] with rows apart, to [T, K].

    See models.ops.elementwise.gated_rms_norm.
    """
    num_rows, width = x.shape
    size = weight.shape[-1]
    output = torch.empty_like(x)
    grid, launch = _launcher(width // size, size, weight.dim() > 1, has_silu, gates_first, x.device)
    launch((num_rows, grid, 1), x, gate, weight, output, gate.stride(0), eps)
    return output


@lru_cache
def _launcher(
    num_groups: int,
    size: int,
    has_weights: bool,
    has_silu: bool,
    gates_first: bool,
    device: torch.device,
) -> tuple[int, Launch]:
    block = triton.next_power_of_2(size)
    groups = min(triton.next_power_of_2(num_groups), max(1, _ELEMENTS // block))
    launch = Launch(
        _gated_rms_norm_kernel, NUM_GROUPS=num_groups, SIZE=size, GROUPS=groups, BLOCK=block,
        HAS_WEIGHTS=has_weights, HAS_SILU=has_silu, GATES_FIRST=gates_first,
        num_warps=min(16, max(1, groups * block // 512)), **launch_options(device),
    )  # fmt: skip
    return triton.cdiv(num_groups, groups), launch
