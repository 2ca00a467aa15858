"""Makes the scheduler of an engine, and the loop that runs its steps."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from protos.engine.v1.worker_pb2 import WorkerReady
from services.engine.batch import StepResult, num_rows
from services.engine.config.engine_config import EngineConfig
from services.engine.core.disk_reports import read_host_limits
from services.engine.core.stats import Counters
from services.engine.core.step_loop import StepLoop
from services.engine.kv_cache.block_events import BlockEvents
from services.engine.kv_cache.prefix_journal import BlockJournal, JointPrefixJournal
from services.engine.limits import StepLimits
from services.engine.request import Request
from services.engine.scheduler.adapter_slots import AdapterSlots
from services.engine.scheduler.data_parallel import DataParallelScheduler
from services.engine.scheduler.dispatcher import GraphDispatcher
from services.engine.scheduler.scheduler import ScheduledStep, Scheduler


def make_step_loop(
    config: EngineConfig,
    limits: StepLimits,
    ready: WorkerReady,
    *,
    dispatcher: GraphDispatcher,
    counters: Counters,
    events: Sequence[BlockEvents] = (),
    **others: Any,
) -> StepLoop:
    """Returns the loop of a worker that has just become ready.

    Args:
        config: settings of the queue and the cache.
        limits: of steps and sequences.
        ready: the sizes of a rank's KV cache and of its memory on the host.
        dispatcher: knows the graphs.
        counters: of the workers before this one.
        events: take each rank's stored and removed blocks; none without --kv-events.
        others: arguments of the loop, besides its scheduler.
    """
    make = partial(
        Scheduler,
        limits,
        num_blocks=ready.num_blocks,
        max_num_waiting=config.scheduler.max_num_waiting,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        counts=counters.scheduler,
        host=read_host_limits(ready),
        priority_ageing_s=config.scheduler.priority_ageing_s,
    )
    if config.adapters.lora_experts:
        # A rank's experts compute the tokens of all ranks.
        make = partial(make, adapters=AdapterSlots(limits.num_adapter_slots, counters.scheduler))
    num_ranks = limits.data_parallel_size
    # A key is present while any rank or tier has it.
    is_joint = num_ranks > 1 or ready.num_host_slots > 0
    joint = JointPrefixJournal() if is_joint else None
    journals = [BlockJournal(joint, each) for each in events]
    journals = journals or [BlockJournal(joint) for _ in range(num_ranks)]
    if num_ranks == 1:
        alone = make(dispatcher=dispatcher, journal=journals[0])
        return StepLoop(scheduler=alone, counters=counters, **others)
    ranks = [make(journal=each) for each in journals]
    together = DataParallelScheduler(ranks, dispatcher, draft_lengths=limits.draft_lengths)
    return DataParallelLoop(scheduler=together, counters=counters, **others)


def make_block_events(config: EngineConfig, limits: StepLimits) -> list[BlockEvents]:
    """Returns each rank's record of cached blocks; none without --kv-events."""
    num_ranks = limits.data_parallel_size if config.cache.kv_events else 0
    return [BlockEvents() for _ in range(num_ranks)]


class DataParallelLoop(StepLoop):
    """Runs the steps of all ranks on their workers until one is lost."""

    @property
    def requests_in_flight(self) -> set[Request]:
        """The requests of the steps in flight, of all ranks."""
        return {
            request
            for step in self._in_flight
            for part in (step, *step.others)
            for request in (*part.requests, *part.unsampled)
        }

    def _count(self, step: ScheduledStep, result: StepResult) -> None:
        """Counts one step for all ranks, and shows their parts to watchers."""
        parts = (step, *step.others)
        if step.has_requests:
            self._count_sizes(parts, result)
        if self._watchers.are_any:
            for part, own in zip(parts, _separate(result), strict=True):
                self._watchers.publish(part, own)

    def _count_sizes(self, parts: Sequence[ScheduledStep], result: StepResult) -> None:
        """Counts a step of the size that each rank computed."""
        counters = self._counters
        largest = max(parts, key=lambda part: part.descriptor.context.num_tokens)
        counters.graph_dispatch[self._graphs.count(largest.descriptor, result)] += 1
        for each in result.across_dp:
            self._graphs.count_encoder(each)
        counters.drafts.count_step(parts[0].descriptor)
        for part, own in zip(parts, (result, *result.across_dp), strict=True):
            counters.drafts.count(part.descriptor, own)
            counters.count_images(own)
        contexts = [part.descriptor.context for part in parts]
        counters.num_step_tokens += sum(each.num_tokens for each in contexts)
        self._history.count(
            num_tokens=num_rows(parts[0].descriptor),
            batch_size=max(each.batch_size for each in contexts),
        )


def _separate(result: StepResult) -> list[StepResult]:
    """Takes joined results apart."""
    others = []
    for each in result.across_dp:
        others.append(StepResult())
        others[-1].CopyFrom(each)
    result.ClearField("across_dp")
    return [result, *others]
