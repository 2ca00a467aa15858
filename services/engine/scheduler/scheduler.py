"""Decides which request computes which tokens in the next step.

Steps overlap: the next one is scheduled before the results of the last ones are back. A request
counts as computed what was ordered, and the tokens it sampled in steps on their way are pending:
the worker has them, the scheduler does not know them yet. See services.engine.kv_cache.cache for
why blocks and rows may be given to others meanwhile.

With speculative decoding a step brings a request one token or more, so it is only scheduled again
when its result is back.
"""

import time
from bisect import insort
from collections.abc import Callable, Sequence
from itertools import accumulate

from services.engine.batch import StepResult, read_logprobs, read_tokens
from services.engine.errors import (
    InvalidRequestError,
    MemoryExhaustedError,
    QueueFullError,
    RequestFaultError,
)
from services.engine.kv_cache.cache import KVCache
from services.engine.kv_cache.prefix_journal import PrefixChanges, PrefixCursor
from services.engine.request import FinishReason, Request, RequestOutput, RequestStatus
from services.engine.scheduler.dispatcher import GraphDispatcher
from services.engine.scheduler.finish_rate import FinishRate
from services.engine.scheduler.limits import SchedulerLimits
from services.engine.scheduler.planned_step import PlannedStep, ScheduledStep, sampling_needs
from services.engine.scheduler.prompt_logprobs import attach_prompt_logprobs
from services.engine.scheduler.stats import SchedulerStats
from services.engine.scheduler.step_budget import StepBudget
from services.engine.scheduler.waiting_queue import WaitingQueue, rank_s, service_order
from services.engine.spec_decode.draft_plan import cut_at_end

__all__ = ["ScheduledStep", "Scheduler", "SchedulerLimits"]


class Scheduler:
    """Admits, chunks, preempts and finishes requests.

    Running requests are kept in service order: by arrival, which priority moves. A step gives every
    running request at least one token, prompts as many as the budget leaves, and the rest of the
    budget to requests that wait, in the same order and none past another. When no block is free,
    the last running request gives all of its blocks back and starts over later. The first one
    never has to, so somebody always gets on.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        dispatcher: GraphDispatcher | None = None,
        priority_ageing_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without requests and with an empty cache.

        Args:
            limits: what the worker can hold.
            dispatcher: knows what the worker can replay; by default it can replay nothing.
            priority_ageing_s: seconds of waiting that are worth one step of priority.
            clock: tells the time of `Request.arrival_s`, in seconds.
        """
        self._limits = limits
        self._drafts = limits.draft_plan
        self._budget = StepBudget(limits.max_num_batched_tokens)
        self._num_failed_steps = 0
        self._clock = clock
        self._priority_ageing_s = priority_ageing_s
        self._dispatcher = dispatcher or GraphDispatcher()
        self._cache = KVCache(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            groups=limits.cache_groups,
        )
        # A request's table has an entry of each group for the tokens of a block.
        self._num_groups = len(limits.windows)
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._free_rows = list(reversed(range(limits.max_num_seqs)))
        self._row_needs = [0] * limits.max_num_seqs
        self._finish_rate = FinishRate()
        self._num_added = 0
        self._last_step_id = 0
        self._last_result_id = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._output_tokens = 0
        self._num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, for the first time or after a preemption."""
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold a row and blocks, in service order."""
        return self._running

    @property
    def next_step_id(self) -> int:
        """The step that `schedule` plans next."""
        return self._last_step_id + 1

    @property
    def is_speculative(self) -> bool:
        """Whether only the result of a step tells how many tokens it brought."""
        return self._drafts is not None

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        """What the scheduler holds now and has done so far."""
        return SchedulerStats(
            num_free_blocks=self._cache.num_free_blocks,
            num_cached_blocks=self._cache.num_cached_blocks,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            num_preemptions=self._num_preemptions,
            num_batched_tokens_limit=self._budget.tokens,
        )

    def prefix_changes(self, cursor: PrefixCursor | None, *, max_keys: int) -> PrefixChanges:
        """Returns which cached prefixes came and went behind a cursor; None begins anew."""
        return self._cache.prefix_changes(cursor, max_keys=max_keys)

    def add(self, request: Request) -> None:
        """Takes a new request into the waiting queue.

        It ends with FinishReason.LENGTH at the latest where `SchedulerLimits.bound_tokens` says.

        Raises:
            InvalidRequestError: the prompt is too long for the model or for the KV cache, or the
                request has been resumed with nothing left to do.
            QueueFullError: too many requests wait.
        """
        max_num_tokens = self._limits.bound_tokens(
            request.num_prompt_tokens, request.sampling.max_tokens
        )
        if len(request.token_ids) >= max_num_tokens:
            raise InvalidRequestError(
                f"the request has {len(request.token_ids)} tokens already; it can have"
                f" {max_num_tokens}"
            )
        if len(self._waiting) >= self._limits.max_num_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait; the limit is {self._limits.max_num_waiting}",
                retry_after_ms=self._finish_rate.retry_after_ms(self._clock()),
            )
        request.max_num_tokens = max_num_tokens
        self._enqueue(request)

    def resume(self, request: Request) -> None:
        """Takes a request over whose worker is gone; it goes on behind the tokens known.

        Raises:
            InvalidRequestError: it fitted that worker's KV cache and does not fit this one's.
        """
        bound = self._limits.bound_tokens(request.num_prompt_tokens, request.sampling.max_tokens)
        if bound < request.max_num_tokens:
            raise InvalidRequestError(
                f"the request may reach {request.max_num_tokens} tokens; "
                f"the KV cache of the next worker holds {self._limits.num_cache_tokens}"
            )
        request.restart()
        self._enqueue(request)

    def abort(self, request: Request) -> bool:
        """Ends a request without output and frees what it holds; returns whether it was live."""
        if request.status is RequestStatus.FINISHED:
            return False
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        self._end(request)
        return True

    def schedule(self) -> ScheduledStep | None:
        """Plans the next step; the worker must run the steps in the order of these calls.

        Returns:
            The step, or None when nothing can run before a result or a request comes in.
        """
        self._make_way_for_suspect()
        step = PlannedStep(
            self._budget.tokens,
            self._row_needs,
            num_spec_steps=self._limits.num_speculative_tokens,
        )
        num_preemptions = self._num_preemptions
        self._continue_running(step)
        if num_preemptions == self._num_preemptions:
            self._admit(step)
        if step.is_empty:
            return None
        self._last_step_id += 1
        ordered = step.order(self._last_step_id, self._dispatcher)
        if self._num_failed_steps:
            ordered.descriptor.num_failed_steps = self._num_failed_steps
        return ordered

    def update(self, step: ScheduledStep, result: StepResult) -> list[RequestOutput]:
        """Takes the tokens of a step, in the order of the steps, and ends who is done.

        Returns:
            One output for each request that sampled and is still live. One that ended since the
            step was scheduled has sampled in vain.
        """
        self._last_result_id = step.step_id
        self._budget.count_good_step()
        now_s = self._clock()
        outputs: list[RequestOutput] = []
        is_speculative = self._drafts is not None
        for request, token_ids in zip(step.requests, read_tokens(result), strict=True):
            if request.status is RequestStatus.FINISHED:
                continue
            request.num_pending_tokens -= 1
            kept = cut_at_end(request, token_ids) if is_speculative else token_ids
            if kept[-1] < 0:
                self._end(request)
                error = RequestFaultError("the largest of its logits was NaN or infinite")
                outputs.append(RequestOutput(request, [], error=error))
                continue
            request.token_ids += kept
            self._output_tokens += len(kept)
            if request.first_token_s is None:
                request.first_token_s = now_s
            output = RequestOutput(request, kept)
            outputs.append(output)
        if self._drafts is not None:
            self._drafts.settle(step.requests, result)
        self._conclude(outputs)
        self._running = [r for r in self._running if r.status is RequestStatus.RUNNING]
        if step.descriptor.sampling.needs_logprobs:
            _attach_logprobs(outputs, step, result)
        if step.prompt_spans:
            attach_prompt_logprobs(outputs, step.prompt_spans, result)
        return outputs

    def retreat(self, steps: Sequence[ScheduledStep]) -> list[RequestOutput]:
        """Takes back the orders of a step that ran out of memory and of all that build on it.

        Whoever runs starts over behind what was computed before them, and steps get smaller. One
        that failed with a single token ends that token's request.

        Args:
            steps: the one that failed and those in flight behind it, which the worker skips.
        """
        failed = steps[0]
        for step in steps:
            for request, num_computed in step.starts():
                self._cache.forget_from(request, num_computed)
                request.num_computed_tokens = min(request.num_computed_tokens, num_computed)
            for request in step.requests:
                request.num_pending_tokens -= 1
        while self._running:
            self._preempt(self._running.pop())
        self._num_failed_steps += 1
        self._last_result_id = self._last_step_id
        num_tokens = failed.descriptor.context.num_tokens
        self._budget.halve(num_tokens)
        request = (failed.requests + failed.unsampled)[0]
        if num_tokens > 1 or request.status is RequestStatus.FINISHED:
            return []
        self._end(request)
        error = MemoryExhaustedError("there is no memory left for a step of one token")
        return [RequestOutput(request, [], error=error)]

    def _enqueue(self, request: Request) -> None:
        request.rank_s = rank_s(self._clock(), request.priority, self._priority_ageing_s)
        request.arrival_index = self._num_added
        self._num_added += 1
        self._waiting.push(request)

    def _make_way_for_suspect(self) -> None:
        """Takes back what everybody holds if a suspect is next: it has to run alone."""
        request = self._waiting.peek()
        if request is not None and request.is_suspect:
            while self._running and not self._running[-1].is_suspect:
                self._preempt(self._running.pop())

    def _may_join(self, request: Request) -> bool:
        """Whether a request may run in the next step: no suspect has company, sent or planned."""
        if request.is_suspect:
            return not self._running and self._last_result_id == self._last_step_id
        return not (self._running and self._running[0].is_suspect)

    def _continue_running(self, step: PlannedStep) -> None:
        """Gives every running request its next tokens, preempting the last ones if need be."""
        running, block_size, drafts = self._running, self._limits.block_size, self._drafts
        index = 0
        while index < len(running):  # preemption shortens the list from its end
            request = running[index]
            index += 1
            num_tokens = len(request.token_ids) + request.num_pending_tokens
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is on its way
            if request.constraint is not None and request.awaits_mask:
                continue
            if drafts is not None and request.num_pending_tokens:
                continue  # it is not known where it will go on
            row = request.row
            assert row is not None, "a running request has a row"
            q_len = num_tokens - request.num_computed_tokens + len(request.draft_token_ids)
            if q_len > 1:  # leave a token for each one behind it
                q_len = min(q_len, step.budget - (len(running) - index))
            num_blocks = len(request.block_ids)
            end = request.num_computed_tokens + q_len
            reach = end if drafts is None else drafts.reach(end)
            if reach * self._num_groups > num_blocks * block_size:
                self._cache.cache_full_blocks(request)
                added = self._allocate(request, reach)
                if added is None:
                    break  # it gave up its own blocks, having been the last
                step.add_blocks(row, num_blocks, added)
            step.compute(request, row, q_len, num_tokens)
            if q_len > 1:  # prompts are worth sharing at once
                self._cache.cache_full_blocks(request)

    def _allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Gets blocks for a running request, from the last running ones if none are free.

        Returns:
            The blocks added, or None when the request itself was the last and was preempted.
        """
        while (added := self._cache.allocate(request, num_tokens)) is None:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return None
        return added

    def _preempt(self, request: Request) -> None:
        """Takes back all that a request holds; it starts over when its turn comes again."""
        self._release(request)
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self._waiting.push(request)
        self._num_preemptions += 1

    def _admit(self, step: PlannedStep) -> None:
        """Spends what is left of the budget on requests that wait.

        The next one comes in only if blocks for all of its tokens are free, though it may take
        them chunk by chunk: otherwise it would be the first to be preempted, over and over.
        """
        max_running = min(self._limits.max_running, self._budget.tokens)
        while step.budget and len(self._running) < max_running:
            request = self._waiting.peek()
            if request is None or request.num_pending_tokens or request.awaits_mask:
                break  # tokens of a preempted request that are on their way must be known first
            if not self._may_join(request):
                break
            # Cached tokens have no log-probabilities.
            prefix = [] if request.needs_prompt_logits else self._cache.match_prefix(request)
            if self._is_being_computed(request, len(prefix) // self._num_groups):
                break
            num_tokens = len(request.token_ids)
            if not self._cache.fits(prefix, self._reach(num_tokens)):
                break
            self._waiting.pop()
            self._start(request, prefix)
            q_len = min(num_tokens - request.num_computed_tokens, step.budget)
            added = self._cache.allocate(request, self._reach(request.num_computed_tokens + q_len))
            assert added is not None, "all of its blocks were free"
            row = self._take_row(request)
            step.assign_row(row, request)
            step.add_blocks(row, 0, request.block_ids)
            step.compute(request, row, q_len, num_tokens)
            self._cache.cache_full_blocks(request)

    def _is_being_computed(self, request: Request, num_blocks: int) -> bool:
        """Whether a running request is about to compute the block behind a prefix of this one.

        Waiting for it costs less than computing it twice. Outputs of one prompt find its blocks so.
        """
        start = num_blocks * self._limits.block_size
        end = start + self._limits.block_size
        is_alone = not self._limits.enable_prefix_caching or request.needs_prompt_logits
        if is_alone or end >= len(request.token_ids):
            return False
        return any(
            other.num_computed_tokens < end <= len(other.token_ids)
            and other.cache_salt == request.cache_salt
            and other.token_ids[:end] == request.token_ids[:end]
            for other in self._running
        )

    def _reach(self, end: int) -> int:
        """Returns how many tokens a request's blocks must hold when it computes up to `end`."""
        return end if self._drafts is None else self._drafts.reach(end)

    def _start(self, request: Request, prefix: list[int]) -> None:
        """Makes a request that waited a running one, with the prefix that is already computed."""
        self._cache.take_prefix(request, prefix)
        request.num_computed_tokens = len(prefix) // self._num_groups * self._limits.block_size
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=service_order)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
            request.first_step_id = self.next_step_id
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self._prompt_tokens += request.num_prompt_tokens
            self._cached_tokens += request.num_cached_tokens

    def _take_row(self, request: Request) -> int:
        row = self._free_rows.pop()
        request.row = row
        self._row_needs[row] = sampling_needs(request.sampling)
        return row

    def _release(self, request: Request) -> None:
        """Takes back blocks and row of a request that runs."""
        assert request.row is not None, "a running request has a row"
        self._cache.free(request)
        self._free_rows.append(request.row)
        request.row = None

    def _conclude(self, outputs: Sequence[RequestOutput]) -> None:
        """Ends who is done with these tokens; grammars of those who are not go on."""
        for output in outputs:
            if output.token_ids:
                self._finish_if_done(output, output.token_ids[-1])
                constraint = output.request.constraint
                if constraint is not None and output.finish_reason is None:
                    constraint.advance(output.token_ids[-1])

    def _finish_if_done(self, output: RequestOutput, token_id: int) -> None:
        """Ends a request whose newest token is an end token or its last one."""
        request = output.request
        sampling = request.sampling
        if token_id in sampling.end_token_ids and request.num_output_tokens > sampling.min_tokens:
            output.finish_reason = FinishReason.STOP
            output.stop_token_id = token_id
        elif len(request.token_ids) >= request.max_num_tokens:
            output.finish_reason = FinishReason.LENGTH
        else:
            return
        self._end(request)

    def _end(self, request: Request) -> None:
        """Ends a request that runs or waits; the caller takes it off the running list."""
        was_running = request.status is RequestStatus.RUNNING
        request.status = RequestStatus.FINISHED
        if was_running:
            self._release(request)
        else:
            self._waiting.discard(request)
        self._finish_rate.record(self._clock())


def _attach_logprobs(outputs: list[RequestOutput], step: ScheduledStep, result: StepResult) -> None:
    """Gives the outputs of requests that asked for log-probabilities theirs."""
    counts = [len(token_ids) for token_ids in read_tokens(result)]
    wanted = [
        request.sampling.logprobs
        for request, count in zip(step.requests, counts, strict=True)
        for _ in range(count)
    ]
    positions = read_logprobs(result, wanted)
    first = dict(zip(step.requests, accumulate(counts, initial=0), strict=False))
    for output in outputs:
        if output.request.sampling.logprobs is not None:
            start = first[output.request]
            found = positions[start : start + len(output.token_ids)]
            output.logprobs += [position for position in found if position is not None]
