"""Adds up the parts of a product whose inputs were split."""

import torch
import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)

_BLOCK = 1024


@triton.jit(do_not_specialize=["size"])
def _sum_parts_kernel(
    parts_ptr, output_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < size
    total = tl.load(parts_ptr + at, mask=is_inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * size.to(tl.int64) + at, mask=is_inside, other=0.0)
    tl.store(output_ptr + at, total.to(output_ptr.dtype.element_ty), mask=is_inside)


def sum_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Adds parts [S, T, N], contiguous float32, in order; returns [T, N] of `dtype`."""
    output = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    _sum_parts_kernel[(triton.cdiv(output.numel(), _BLOCK),)](
        parts, output, output.numel(), PARTS=len(parts), BLOCK=_BLOCK, num_warps=4,
        **launch_options(parts.device),
    )  # fmt: skip
    return output
