"""The load of whole experts, and plans that even it out over the ranks while they serve."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from models.parallel.expert_balance import rebalanced
from models.parallel.expert_placement import ExpertPlacement
from protos.engine.v1.worker_pb2 import ExpertLayout, ExpertLoad
from services.engine.core.stats import Counters

log = structlog.get_logger()

READ_TIMEOUT_S = 2.0
"""Longest wait for the worker's counts, which come after the steps that it has queued."""

LEAST_GAIN = 0.05
"""Share of the busiest rank's load that a move must take off it: a smaller one is chance."""


class ExpertChannel(Protocol):
    """The part of an executor that reads and moves experts."""

    def place_experts(self, layer: int, placement: Sequence[int]) -> None:
        """Orders a move of a layer's experts between the steps before and after the call."""

    def read_expert_load(self) -> None:
        """Asks for the load of experts, which comes to `ExpertBalance.take`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFigures:
    """One layer: choices of each expert since the worker became ready, and who holds them now."""

    expert_load: Sequence[int]
    placement: ExpertPlacement


class ExpertBalance:
    """Moves the experts of one worker's ranks.

    Every `interval` steps it reads the load, and then plans and moves one layer before each step:
    a step waits for one layer at most, and every rank moves between the same two steps.
    """

    def __init__(
        self, layout: ExpertLayout, channel: ExpertChannel, *, interval: int, counters: Counters
    ) -> None:
        """Begins with the placement of a worker that has just become ready.

        Args:
            layout: the worker's experts.
            channel: reads and moves them.
            interval: steps between plans; 0 for none.
            counters: counts moves.
        """
        self._channel = channel
        self._interval = interval
        self._counters = counters
        first = ExpertPlacement(
            num_experts=layout.num_experts,
            num_ranks=layout.num_ranks,
            physical_to_logical=tuple(layout.physical_to_logical),
        )
        self._placements = [first] * layout.num_layers
        nothing = [0] * layout.num_experts
        self._loads = [nothing] * layout.num_layers
        self._loads_at_last_plan = self._loads
        self._num_steps = 0
        self._awaits_plan = False
        self._unplanned: deque[tuple[int, list[int]]] = deque()
        """Layers to plan, each with its load since the last plan."""
        self._readers: list[asyncio.Future[None]] = []

    def begin_step(self) -> None:
        """Moves a layer's experts, or asks for their load, before a step is ordered."""
        if not self._interval:
            return
        self._num_steps += 1
        if self._unplanned:
            self._move(*self._unplanned.popleft())
        elif self._num_steps >= self._interval and not self._awaits_plan:
            self._num_steps = 0
            self._awaits_plan = True
            self._channel.read_expert_load()

    def take(self, load: ExpertLoad) -> None:
        """Takes the worker's counts."""
        size = len(self._loads[0])
        counts = list(load.counts)
        self._loads = [counts[first : first + size] for first in range(0, len(counts), size)]
        if self._awaits_plan:
            self._awaits_plan = False
            for layer, (now, before) in enumerate(
                zip(self._loads, self._loads_at_last_plan, strict=True)
            ):
                since = [new - old for new, old in zip(now, before, strict=True)]
                self._unplanned.append((layer, since))
            self._loads_at_last_plan = self._loads
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)

    async def figures(self) -> list[ExpertFigures]:
        """Returns every layer's figures; the last known ones if the worker is busy."""
        reader = asyncio.get_running_loop().create_future()
        if not self._readers and not self._awaits_plan:
            self._channel.read_expert_load()
        self._readers.append(reader)
        await asyncio.wait([reader], timeout=READ_TIMEOUT_S)
        return [
            ExpertFigures(expert_load=load, placement=placement)
            for load, placement in zip(self._loads, self._placements, strict=True)
        ]

    def _move(self, layer: int, load: list[int]) -> None:
        """Plans a layer, and orders the move if the plan is a better one."""
        before = self._placements[layer]
        after = rebalanced(before, load)
        busiest_before, busiest_after = max(before.rank_loads(load)), max(after.rank_loads(load))
        if busiest_after > (1 - LEAST_GAIN) * busiest_before or after is before:
            return
        self._placements[layer] = after
        self._channel.place_experts(layer, after.physical_to_logical)
        self._counters.num_expert_moves += 1
        log.info(
            "experts_were_moved",
            layer=layer,
            busiest_rank_before=round(busiest_before),
            busiest_rank_after=round(busiest_after),
        )
