"""Compares the kernels that communicate through the ranks' memory with torch, before their use.

A fault ends no comparison early: the others communicate too.
"""

from collections.abc import Callable, Collection
from typing import Protocol

import torch

from models.number_formats import BLOCK
from models.ops.ranks.all_reduce_norm import ordered_sum, ordered_sum_norm
from models.parallel.collectives import FusedRows, FusedSum, LostPeerError, gather_into
from models.parallel.group import ParallelGroup

_MANY_BYTES = 2**20
"""Of rows that every number of ranks sums in the way for many."""
_FEW_ROWS = (1, 7, 150)
"""Of each rank; the last are more than a GPU computes at once."""
_REPEATS = 3
"""Of each comparison: buffers alternate."""
_EPS = 1e-6


class FusedCollectives(FusedSum, FusedRows, Protocol):
    """All kernels that communicate through the ranks' memory."""


def sums_fault(
    fused: FusedSum,
    group: ParallelGroup,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    roundings: Collection[bool],
) -> str:
    """Returns a fault of the sum with residual and norm, or an empty string.

    roundings: of the norm to FP8: whether scales are by block of features.
    """
    many = _MANY_BYTES // (hidden_size * dtype.itemsize) + 3
    draws = torch.Generator(device).manual_seed(many)

    def difference(num_rows: int) -> str:
        shape = (num_rows, hidden_size)
        # All ranks draw the same.
        residual, x = _drawn(draws, 2, *shape, dtype=dtype)
        weight = _drawn(draws, hidden_size, dtype=dtype)
        x = x.roll(group.rank, dims=-1).contiguous()
        total = residual.clone()
        expected = ordered_sum_norm(_gathered(x, group), total, weight, _EPS)
        stream = residual.clone()
        normed = fused.add_norm(x, stream, weight, _EPS)
        faults = [] if torch.equal(stream, total) else [f"a sum of {num_rows} rows is wrong"]
        if not torch.allclose(normed.float(), expected.float(), rtol=2e-2, atol=2e-2):
            faults.append(f"a norm of {num_rows} rows is wrong")
        for is_blocked in roundings:
            stream = residual.clone()
            rounded = fused.add_rounded_norm(x, stream, weight, _EPS, is_blocked=is_blocked)
            if not (torch.equal(stream, total) and _is_rounding(rounded, normed, is_blocked)):
                faults.append(f"a norm of {num_rows} rows is rounded wrong")
        return next(iter(faults), "")

    return _first_fault(fused, difference, (1, 7, many), device)


def rows_fault(
    fused: FusedRows,
    group: ParallelGroup,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Returns a fault of gathering rows or sharing out their sums, or an empty string."""
    draws = torch.Generator(device).manual_seed(hidden_size)

    def difference(num_rows: int) -> str:
        if not fused.takes_rows((num_rows, hidden_size), dtype):
            return ""
        x = _drawn(draws, group.size * num_rows, hidden_size, dtype=dtype)
        x = x.roll(group.rank, dims=-1).contiguous()
        parts = _gathered(x, group)
        gathered, share = fused.gather_rows(x[:num_rows]), fused.reduce_scatter(x)
        own = slice(group.rank * num_rows, (group.rank + 1) * num_rows)
        if not torch.equal(gathered, parts[:, :num_rows].flatten(0, 1)):
            return f"the gathered {num_rows} rows of each rank are wrong"
        is_equal = torch.equal(share, ordered_sum(parts[:, own]).to(dtype))
        return "" if is_equal else f"the sums of {num_rows} rows of each rank are wrong"

    return _first_fault(fused, difference, _FEW_ROWS, device)


def _first_fault(
    fused: FusedSum | FusedRows,
    difference: Callable[[int], str],
    numbers: Collection[int],
    device: torch.device,
) -> str:
    """Returns the first fault of calls with such numbers of rows; first of all, a late rank."""
    faults = [difference(number) for number in numbers for _ in range(_REPEATS)]
    torch.cuda.synchronize(device)
    try:
        fused.check()
    except LostPeerError as error:
        return str(error)
    return next(filter(None, faults), "")


def _drawn(draws: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=draws, device=draws.device, dtype=dtype)


def _gathered(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    parts = x.new_empty((group.size, *x.shape))
    gather_into(parts, x, group.name)
    return parts


def _is_rounding(
    rounded: tuple[torch.Tensor, torch.Tensor], normed: torch.Tensor, is_blocked: bool
) -> bool:
    """Returns whether these are the values and scales of a launch that rounds the norm."""
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.products.fp8.fp8_linear import quantize

    expected = quantize(normed, BLOCK if is_blocked else normed.shape[-1])
    pairs = zip(rounded, expected, strict=True)
    return all(torch.equal(each.float(), other.float()) for each, other in pairs)
