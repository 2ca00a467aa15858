"""Chooses how a group's collectives run: a library's, or kernels over memory that all ranks reach.

Ranks that share layers add up sums with the residual stream and the norm; data-parallel ranks
gather and share out the rows of experts.
"""

from dataclasses import dataclass
from typing import Self

import structlog
import torch
import torch.distributed as dist

from models.config import ModelConfig
from models.kernels.gpu import has_kernels
from models.layers.quantization import can_run_fp8
from models.parallel.collectives import handle_of, use_fused_rows, use_fused_sum
from models.parallel.group import DATA_PARALLEL, ParallelGroup
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.placement import rank_places
from services.engine.worker.start.exchange_check import FusedCollectives, rows_fault, sums_fault
from services.engine.worker.start.ranks import Ranks

log = structlog.get_logger()

_SHARE_OF_TIMEOUT = 0.8
"""A late rank is named before the service gives up on the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of the residual stream: elements of each, their dtype and device.

    roundings: how products round them to FP8: with scales by block of features or not.
    """

    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    roundings: frozenset[bool] = frozenset()

    @classmethod
    def of(
        cls, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Returns those of a model, before its weights are loaded."""
        schemes = () if model.quantization is None else model.quantization.schemes
        roundings = {each.block_size is not None for each in schemes if each.kind == "fp8"}
        if config.checkpoint.quantization == "fp8":
            roundings.add(False)
        return cls(
            hidden_size=model.hidden_size,
            dtype=dtype,
            device=device,
            roundings=frozenset(roundings if can_run_fp8(device) else ()),
        )


def choose_all_reduce(config: EngineConfig, ranks: Ranks, rows: Rows) -> None:
    """Makes kernels of our own run the group's collectives, if wanted and right on all ranks.

    All ranks call this together.

    Raises:
        ValueError: fused is wanted and impossible.
    """
    wish = config.parallel.all_reduce
    group = ranks.group.of_other_tokens or ranks.group
    if wish == "nccl" or (wish == "auto" and group.size == 1):
        return
    obstacle = ranks.common_fault(_obstacle(config, group, rows))
    if not obstacle:
        limit_s = config.worker.step_limit_s(on_cpu=False)
        fused, fault = _make(group, rows, limit_s * _SHARE_OF_TIMEOUT)
        obstacle = ranks.common_fault(fault)
        if fused is not None and not obstacle:
            obstacle = ranks.common_fault(_fault(fused, group, rows))
            if not obstacle:
                _use(fused, group)
    if obstacle and wish == "fused":
        raise ValueError(f"--all-reduce fused is impossible: {obstacle}")
    log.info("all_reduce_chosen", kind="library" if obstacle else "fused", reason=obstacle)


def _obstacle(config: EngineConfig, group: ParallelGroup, rows: Rows) -> str:
    """Returns the reason why this rank cannot use the kernels; empty if it can."""
    if group.size == 1:
        return "it takes several ranks"
    if group.size < config.parallel.num_ranks:
        return "its memory is that of one group of all ranks, and these are several groups"
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


def _make(
    group: ParallelGroup, rows: Rows, timeout_s: float
) -> tuple[FusedCollectives | None, str]:
    """Returns the kernels with their memory, or the fault that keeps them from being made."""
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.ranks.exchange import Exchange
    from models.kernels.ranks.rank_memory import RankMemory

    handle = handle_of(group.name) or dist.group.WORLD
    assert handle is not None, "the ranks have met"
    try:
        memory = RankMemory.of_group(
            handle, hidden_size=rows.hidden_size, dtype=rows.dtype, device=rows.device
        )
        return Exchange(memory, timeout_s=timeout_s), ""
    except (RuntimeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"


def _fault(fused: FusedCollectives, group: ParallelGroup, rows: Rows) -> str:
    """Compares the kernels with torch, which builds them too; returns a fault or nothing."""
    shape = (rows.hidden_size, rows.dtype, rows.device)
    if group.name == DATA_PARALLEL:
        return rows_fault(fused, group, *shape)
    return sums_fault(fused, group, *shape, roundings=rows.roundings)


def _use(fused: FusedCollectives, group: ParallelGroup) -> None:
    if group.name == DATA_PARALLEL:
        use_fused_rows(group.name, fused)
    else:
        use_fused_sum(group.name, fused)
