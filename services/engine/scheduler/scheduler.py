"""Decides which request computes which tokens in the next step.

Steps overlap: the next one is scheduled before the results of the last ones are back. A request
counts as computed what was ordered, and the tokens it sampled in steps on their way are pending:
the worker has them, the scheduler does not know them yet. See services.engine.kv_cache.cache for
why blocks and rows may be given to others meanwhile.
"""

import time
from bisect import insort
from collections.abc import Callable, Sequence

from services.engine.batch import StepResult, read_int32, read_logprobs
from services.engine.errors import QueueFullError
from services.engine.kv_cache.cache import KVCache
from services.engine.request import FinishReason, Request, RequestOutput, RequestStatus
from services.engine.scheduler.dispatcher import GraphDispatcher
from services.engine.scheduler.finish_rate import FinishRate
from services.engine.scheduler.limits import SchedulerLimits
from services.engine.scheduler.planned_step import PlannedStep, ScheduledStep, sampling_needs
from services.engine.scheduler.stats import SchedulerStats
from services.engine.scheduler.waiting_queue import WaitingQueue, service_order

__all__ = ["ScheduledStep", "Scheduler", "SchedulerLimits"]


class Scheduler:
    """Admits, chunks, preempts and finishes requests.

    Running requests are kept in service order: by priority, then by arrival. A step gives every
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without requests and with an empty cache.

        Args:
            limits: what the worker can hold.
            dispatcher: knows what the worker can replay; by default it can replay nothing.
            clock: tells the time of `Request.arrival_s`, in seconds.
        """
        self._limits = limits
        self._clock = clock
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
        )

    def add(self, request: Request) -> None:
        """Takes a new request into the waiting queue.

        It ends with FinishReason.LENGTH at the latest where `SchedulerLimits.bound_tokens` says.

        Raises:
            InvalidRequestError: the prompt is too long for the model or for the KV cache.
            QueueFullError: too many requests wait.
        """
        max_num_tokens = self._limits.bound_tokens(
            request.num_prompt_tokens, request.sampling.max_tokens
        )
        if len(self._waiting) >= self._limits.max_num_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait; the limit is {self._limits.max_num_waiting}",
                retry_after_ms=self._finish_rate.retry_after_ms(self._clock()),
            )
        request.max_num_tokens = max_num_tokens
        request.arrival_index = self._num_added
        self._num_added += 1
        self._waiting.push(request)

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
        step = PlannedStep(self._limits.max_num_batched_tokens, self._row_needs)
        num_preemptions = self._num_preemptions
        self._continue_running(step)
        if num_preemptions == self._num_preemptions:
            self._admit(step)
        if step.is_empty:
            return None
        self._last_step_id += 1
        return step.order(self._last_step_id, self._dispatcher)

    def update(self, step: ScheduledStep, result: StepResult) -> list[RequestOutput]:
        """Takes the tokens of a step, in the order of the steps, and ends who is done.

        Returns:
            One output for each request that sampled and is still live. One that ended since the
            step was scheduled has sampled in vain.
        """
        token_ids = read_int32(result.token_ids).tolist()
        now_s = self._clock()
        outputs: list[RequestOutput] = []
        for request, token_id in zip(step.requests, token_ids, strict=True):
            if request.status is RequestStatus.FINISHED:
                continue
            request.num_pending_tokens -= 1
            request.token_ids.append(token_id)
            if request.first_token_s is None:
                request.first_token_s = now_s
            output = RequestOutput(request, [token_id])
            outputs.append(output)
            self._finish_if_done(output, token_id)
        self._running = [r for r in self._running if r.status is RequestStatus.RUNNING]
        self._output_tokens += len(outputs)
        if step.descriptor.sampling.needs_logprobs:
            _attach_logprobs(outputs, step, result)
        return outputs

    def _continue_running(self, step: PlannedStep) -> None:
        """Gives every running request its next tokens, preempting the last ones if need be."""
        running, block_size = self._running, self._limits.block_size
        index = 0
        while index < len(running):  # preemption shortens the list from its end
            request = running[index]
            index += 1
            num_tokens = len(request.token_ids) + request.num_pending_tokens
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is on its way
            row = request.row
            assert row is not None, "a running request has a row"
            q_len = num_tokens - request.num_computed_tokens
            if q_len > 1:  # leave a token for each one behind it
                q_len = min(q_len, step.budget - (len(running) - index))
            num_blocks = len(request.block_ids)
            end = request.num_computed_tokens + q_len
            if end * self._num_groups > num_blocks * block_size:
                self._cache.cache_full_blocks(request)
                added = self._allocate(request, end)
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
        request.status = RequestStatus.WAITING
        self._waiting.push(request)
        self._num_preemptions += 1

    def _admit(self, step: PlannedStep) -> None:
        """Spends what is left of the budget on requests that wait.

        The next one comes in only if blocks for all of its tokens are free, though it may take
        them chunk by chunk: otherwise it would be the first to be preempted, over and over.
        """
        while step.budget and len(self._running) < self._limits.max_running:
            request = self._waiting.peek()
            if request is None or request.num_pending_tokens:
                break  # tokens of a preempted request that are on their way must be known first
            prefix = self._cache.match_prefix(request)
            num_tokens = len(request.token_ids)
            if not self._cache.fits(prefix, num_tokens):
                break
            self._waiting.pop()
            self._start(request, prefix)
            q_len = min(num_tokens - request.num_computed_tokens, step.budget)
            added = self._cache.allocate(request, request.num_computed_tokens + q_len)
            assert added is not None, "all of its blocks were free"
            row = self._take_row(request)
            step.assign_row(row, request)
            step.add_blocks(row, 0, request.block_ids)
            step.compute(request, row, q_len, num_tokens)
            self._cache.cache_full_blocks(request)

    def _start(self, request: Request, prefix: list[int]) -> None:
        """Makes a request that waited a running one, with the prefix that is already computed."""
        self._cache.take_prefix(request, prefix)
        request.num_computed_tokens = len(prefix) // self._num_groups * self._limits.block_size
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=service_order)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
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
    wanted = [request.sampling.logprobs for request in step.requests]
    by_request = dict(zip(step.requests, read_logprobs(result, wanted), strict=True))
    for output in outputs:
        position = by_request[output.request]
        if position is not None:
            output.logprobs.append(position)
