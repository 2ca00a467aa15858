"""Agreement of the ranks on a step that ran out of memory: all go on after it, or none does.

Ranks that failed before the same collective of the same step can take the next one together. A rank
that failed alone leaves the others waiting in that collective, so the engine needs new ranks.
"""

import asyncio
from collections.abc import Sequence

from services.engine.batch import StepFailure, StepResult
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.placement import reporting_ranks
from services.engine.worker.rank_process import WorkerDiedError
from services.engine.worker.remote_ranks import Rank

AGREEMENT_GRACE_S = 10.0
"""Time in which all ranks fail at the same place of a step, if they do; at most half of the time
after which a step counts as hung."""


class FailureAgreement:
    """Compares the failures of all ranks: `note` those of each, then `settle` the step."""

    def __init__(self, config: EngineConfig, ranks: Sequence[Rank]) -> None:
        """Starts without failures.

        Args:
            config: the engine's.
            ranks: all of its ranks, in order.
        """
        self._ranks = ranks
        self._reporters = reporting_ranks(config.parallel)
        self._reporter = self._reporters[0]
        self._failures: dict[int, StepResult] = {}
        self._has_failed = asyncio.Event()
        self._limit_s = min(AGREEMENT_GRACE_S, config.worker.step_limit_s(on_cpu=False) / 2)
        if config.parallel.pipeline_parallel_size > 1:
            self._limit_s = 0.0  # another stage waits for this one, and fails nowhere

    def note(self, number: int, result: StepResult) -> None:
        """Takes a rank's result as soon as it comes; ends the engine's steps if it failed alone."""
        if not _is_out_of_memory(result):
            return
        self._failures[number] = result
        self._has_failed.set()
        loop = asyncio.get_running_loop()
        loop.call_later(self._limit_s, self._end_if_alone, number, result)

    async def settle(self, result: StepResult) -> None:
        """Returns if the ranks can go on together; after a failure, once all of them have failed.

        Args:
            result: the reporter's, with those of the other data-parallel ranks.

        Raises:
            WorkerDiedError: a rank failed where another one did not.
        """
        self._require_joint(result)
        if not _is_out_of_memory(result):
            return
        self._failures[self._reporter] = result
        await self._wait_for_all(result)
        failures, self._failures = self._failures, {}
        for number, other in failures.items():
            if (other.step_id, other.num_collectives) != (result.step_id, result.num_collectives):
                raise self._alone(number, other)

    def clear(self) -> None:
        """Forgets all failures, of ranks that have ended."""
        self._failures.clear()

    def _require_joint(self, result: StepResult) -> None:
        """Raises WorkerDiedError if data-parallel ranks did not all fail, or all succeed."""
        for number, each in zip(self._reporters, (result, *result.across_dp), strict=False):
            if each.failure != result.failure:
                failed = (number, each) if each.failure else (self._reporter, result)
                raise self._alone(*failed)

    async def _wait_for_all(self, result: StepResult) -> None:
        """Waits until every rank has failed; if one does not, it waits in a step for the others."""
        try:
            async with asyncio.timeout(self._limit_s):
                while len(self._failures) < len(self._ranks):
                    self._has_failed.clear()
                    await self._has_failed.wait()
        except TimeoutError:
            raise self._alone(self._reporter, result) from None

    def _end_if_alone(self, number: int, result: StepResult) -> None:
        """Ends the reporter's events if the others have not failed in a rank's step."""
        if self._failures.get(number) is result:
            self._ranks[self._reporter].interrupt(self._alone(number, result))

    def _alone(self, number: int, result: StepResult) -> WorkerDiedError:
        return WorkerDiedError(
            f"{self._ranks[number].name} ran out of memory in step {result.step_id} where other "
            "ranks did not; they cannot go on together"
        )


def _is_out_of_memory(result: StepResult) -> bool:
    return result.failure == StepFailure.STEP_FAILURE_OUT_OF_MEMORY
