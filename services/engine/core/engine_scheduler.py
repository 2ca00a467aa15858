"""Makes the scheduler of an engine, and the loop that runs its steps."""

from functools import partial
from typing import Any

from services.engine.config.engine_config import EngineConfig
from services.engine.core.data_parallel_loop import DataParallelLoop
from services.engine.core.step_loop import StepLoop
from services.engine.kv_cache.prefix_journal import JointPrefixJournal
from services.engine.limits import StepLimits
from services.engine.scheduler.data_parallel import DataParallelScheduler
from services.engine.scheduler.dispatcher import GraphDispatcher
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.stats import SchedulerCounts


def make_step_loop(
    config: EngineConfig,
    limits: StepLimits,
    *,
    num_blocks: int,
    dispatcher: GraphDispatcher,
    counts: SchedulerCounts,
    **others: Any,
) -> StepLoop:
    """Returns the loop of a worker that has just become ready.

    Args:
        config: settings of the queue and the cache.
        limits: of steps and sequences.
        num_blocks: blocks of a rank's KV cache.
        dispatcher: knows the graphs.
        counts: of the schedulers before this one.
        others: arguments of the loop, besides its scheduler.
    """
    make = partial(
        Scheduler,
        limits,
        num_blocks=num_blocks,
        max_num_waiting=config.scheduler.max_num_waiting,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        counts=counts,
        priority_ageing_s=config.scheduler.priority_ageing_s,
    )
    if limits.data_parallel_size == 1:
        return StepLoop(scheduler=make(dispatcher=dispatcher), **others)
    journal = JointPrefixJournal()
    ranks = [make(journal=journal) for _ in range(limits.data_parallel_size)]
    scheduler = DataParallelScheduler(ranks, dispatcher, draft_lengths=limits.draft_lengths)
    return DataParallelLoop(scheduler=scheduler, **others)
