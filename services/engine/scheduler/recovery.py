"""Recovery of requests when a step runs out of memory or a worker is lost.

See docs/decisions/0007-suspects-run-alone.md.
"""

from collections.abc import Sequence

from services.engine.batch import num_rows
from services.engine.errors import InvalidRequestError, MemoryExhaustedError
from services.engine.request import Request, RequestOutput, RequestStatus
from services.engine.scheduler.holdings import Holdings
from services.engine.scheduler.planned_step import ScheduledStep
from services.engine.scheduler.tier_orders import TierOrders

NUM_GOOD_STEPS = 500
"""Steps without a failure before the budget doubles."""


def lose_worker(request: Request, *, was_killed: bool) -> None:
    """Counts the loss of a worker whose last steps had the request, which becomes a suspect.

    was_killed: whether the worker was ended from outside; then no request is a suspect.
    """
    request.num_losses += 1
    if not was_killed:
        request.trial_end = len(request.token_ids) + max(1, request.num_pending_tokens)


class Recovery:
    """Takes back failed steps, resumes requests of lost workers, and runs suspects alone."""

    def __init__(
        self,
        holdings: Holdings,
        tiers: TierOrders,
        *,
        max_num_batched_tokens: int,
        min_num_tokens: int = 1,
    ) -> None:
        """Starts with steps of full size, which never shrink to less than the minimum."""
        self.budget = StepBudget(max_num_batched_tokens, min_num_tokens)
        self.num_failed_steps = 0
        self._holdings = holdings
        self._tiers = tiers

    def resume(self, request: Request) -> None:
        """Adds a request of a lost worker, which continues after its known tokens.

        Raises:
            InvalidRequestError: it does not fit this worker's KV cache.
        """
        if self._holdings.bound_tokens(request) < request.max_num_tokens:
            raise InvalidRequestError(
                f"the request may reach {request.max_num_tokens} tokens; "
                f"the KV cache of the next worker holds {self._holdings.num_cache_tokens}"
            )
        request.restart()
        self._tiers.enqueue(request)

    def retreat(self, steps: Sequence[ScheduledStep]) -> list[RequestOutput]:
        """Takes back a step that ran out of memory and all later ones.

        Running requests restart after what earlier steps computed, in smaller steps. If the failed
        step could not be smaller, its first request ends.

        Args:
            steps: the failed one and the later ones in flight, which the worker skips.
        """
        holdings, failed = self._holdings, steps[0]
        for step in steps:
            for request, num_computed in step.starts():
                holdings.cache.forget_from(request, num_computed)
                request.num_computed_tokens = min(request.num_computed_tokens, num_computed)
            for request, num_drafts in zip(step.requests, step.num_drafts, strict=True):
                request.num_pending_tokens -= 1
                request.num_pending_drafts -= num_drafts
        while holdings.running:
            holdings.preempt_last()
        self._tiers.retreat()
        holdings.images.forget()
        holdings.adapters.forget()
        self.num_failed_steps += 1
        # A data-parallel rank computes as many rows as the one with most tokens.
        num_tokens = num_rows(failed.descriptor)
        if num_tokens:
            self.budget.halve(num_tokens)
        requests = failed.requests + failed.unsampled
        is_smallest = num_tokens <= self.budget.least
        if not is_smallest or not requests or requests[0].status is RequestStatus.FINISHED:
            return []
        request = requests[0]
        holdings.end(request)
        error = MemoryExhaustedError(
            "there is no memory left for a step of "
            + ("one token" if num_tokens == 1 else f"{num_tokens} tokens")
        )
        return [RequestOutput(request, [], error=error)]

    def drop_cache(self) -> None:
        """Preempts all running requests and forgets the content of all blocks."""
        while self._holdings.running:
            self._holdings.preempt_last()
        self._holdings.let_go()  # the next step may be hours away
        self._holdings.cache.forget_all()

    def make_way_for_suspect(self) -> None:
        """Preempts all running requests if a suspect is next."""
        holdings = self._holdings
        request = holdings.waiting.peek()
        if request is not None and request.is_suspect:
            while holdings.running and not holdings.running[-1].is_suspect:
                holdings.preempt_last()

    def may_join(self, request: Request, *, is_in_flight: bool) -> bool:
        """Whether a request may run in the next step: a suspect runs alone.

        is_in_flight: whether any step has no result yet.
        """
        running = self._holdings.running
        if request.is_suspect:
            return not running and not is_in_flight
        return not (running and running[0].is_suspect)


class StepBudget:
    """A limit halved by every step that runs out of memory and doubled after good ones."""

    def __init__(self, limit: int, least: int = 1) -> None:
        self.tokens = limit
        self.least = least
        self._limit = limit
        self._num_good_steps = 0

    def halve(self, num_tokens: int) -> None:
        """Sets a budget below a failed step of `num_tokens`."""
        self.tokens = max(self.least, min(self.tokens, num_tokens) // 2)
        self._num_good_steps = 0

    def count_good_step(self) -> None:
        """Counts a step that did not run out of memory."""
        if self.tokens == self._limit:
            return
        self._num_good_steps += 1
        if self._num_good_steps == NUM_GOOD_STEPS:
            self.tokens = min(2 * self.tokens, self._limit)
            self._num_good_steps = 0
