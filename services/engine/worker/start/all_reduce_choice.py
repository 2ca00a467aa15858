"""Chooses how a group's sums with the residual stream and the norm run."""

from dataclasses import dataclass

import structlog
import torch
import torch.distributed as dist

from models.ops.communication.all_reduce_norm import ordered_sum_norm
from models.ops.kernel_choice import has_kernels
from models.parallel.collectives import FusedSum, LostPeerError, gather_into, use_fused_sum
from models.parallel.group import TENSOR_PARALLEL
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.placement import rank_places
from services.engine.worker.start.ranks import Ranks

log = structlog.get_logger()

_SHARE_OF_TIMEOUT = 0.8
"""A late rank is named before the service gives up on the step."""
_MANY_BYTES = 2**20
"""Of rows that every number of ranks sums in the way for many."""
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of the residual stream: elements of each, their dtype and device."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device


def choose_all_reduce(config: EngineConfig, ranks: Ranks, rows: Rows) -> None:
    """Makes the fused kernel run the group's sums, if it is wanted and works on all ranks.

    All ranks call this together.

    Raises:
        ValueError: fused is wanted and impossible.
    """
    wish = config.parallel.all_reduce
    if wish == "nccl" or (wish == "auto" and ranks.group.size == 1):
        return
    obstacle = ranks.common_fault(_obstacle(config, rows))
    if not obstacle:
        timeout_s = config.worker.step_timeout_s * _SHARE_OF_TIMEOUT
        fused, fault = _make(rows, timeout_s)
        obstacle = ranks.common_fault(fault)
        if fused is not None and not obstacle:
            obstacle = ranks.common_fault(_difference(fused, rows))
            if not obstacle:
                use_fused_sum(TENSOR_PARALLEL, fused)
    if obstacle and wish == "fused":
        raise ValueError(f"--all-reduce fused is impossible: {obstacle}")
    log.info("all_reduce_chosen", kind="library" if obstacle else "fused", reason=obstacle)


def _obstacle(config: EngineConfig, rows: Rows) -> str:
    """Returns the reason why this rank cannot use the kernel; empty if it can."""
    if config.parallel.num_ranks == 1:
        return "it takes several ranks"
    if config.parallel.tensor_parallel_size < config.parallel.num_ranks:
        return "its memory is that of all ranks, and some share no sums"
    if config.parallel.num_nodes > 1:
        return "the ranks are on several hosts, and it takes memory that all of them reach"
    if not has_kernels(rows.device):
        return "it takes GPUs and Triton"
    if rows.dtype.itemsize != 2 or rows.hidden_size % 8:
        return f"it takes rows of 16-bit elements in eights, not {rows.hidden_size} {rows.dtype}"
    own = rows.device.index
    unreachable = [
        place.device
        for place in rank_places(config.parallel)
        if place.device != own and not torch.cuda.can_device_access_peer(own, place.device)
    ]
    return f"GPU {own} cannot reach the memory of GPUs {unreachable}" if unreachable else ""


def _make(rows: Rows, timeout_s: float) -> tuple[FusedSum | None, str]:
    """Returns the kernel with its memory, or the fault that keeps it from being made."""
    # Imported on first use: a CPU installation has no Triton.
    from models.ops.triton.communication.exchange import Exchange

    assert dist.group.WORLD is not None, "the ranks have met"
    try:
        return Exchange(
            dist.group.WORLD,
            hidden_size=rows.hidden_size,
            dtype=rows.dtype,
            device=rows.device,
            timeout_s=timeout_s,
        ), ""
    except (RuntimeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"


def _difference(fused: FusedSum, rows: Rows) -> str:
    """Compares the kernel with torch, which builds it too; returns a fault or an empty string.

    A fault ends no comparison early: the others communicate too.
    """
    many = _MANY_BYTES // (rows.hidden_size * rows.dtype.itemsize) + 3
    faults = [_difference_of(fused, rows, number) for number in (1, 7, many) for _ in range(3)]
    return next(filter(None, faults), "")


def _difference_of(fused: FusedSum, rows: Rows, num_rows: int) -> str:
    """Returns a fault if the kernel's sum or norm is not the one that torch computes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (num_rows, rows.hidden_size)
    draws = torch.Generator(rows.device).manual_seed(num_rows)
    residual, x = (
        torch.randn(shape, generator=draws, device=rows.device, dtype=rows.dtype) for _ in range(2)
    )
    weight = torch.randn(rows.hidden_size, generator=draws, device=rows.device, dtype=rows.dtype)
    x = x.roll(rank, dims=-1).contiguous()
    parts = torch.empty((size, *shape), device=rows.device, dtype=rows.dtype)
    gather_into(parts, x, TENSOR_PARALLEL)
    expected_sum = residual.clone()
    expected = ordered_sum_norm(parts, expected_sum, weight, _EPS)
    normed = fused.add_norm(x, residual, weight, _EPS)
    torch.cuda.synchronize(rows.device)
    try:
        fused.check()
    except LostPeerError as error:
        return str(error)
    if not torch.equal(residual, expected_sum):
        return f"a sum of {num_rows} rows is wrong"
    is_close = torch.allclose(normed.float(), expected.float(), rtol=2e-2, atol=2e-2)
    return "" if is_close else f"a norm of {num_rows} rows is wrong"
