"""Decides which request computes which tokens in the next step.

Steps overlap: the next one is scheduled before the results of the last ones are back. A request
counts as computed what was ordered, and the tokens it sampled in steps on their way are pending:
the worker has them, the scheduler does not know them yet. See services.engine.kv_cache.cache for
why blocks and rows may be given to others meanwhile.

With speculative decoding a step brings a request one token or more, so it is only scheduled again
when its result is back.
"""

import time
from collections.abc import Callable, Sequence

from services.engine.batch import StepResult, read_tokens
from services.engine.errors import InvalidRequestError, QueueFullError, RequestFaultError
from services.engine.kv_cache.prefix_journal import PrefixChanges, PrefixCursor
from services.engine.limits import StepLimits
from services.engine.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestStatus,
    StepMark,
)
from services.engine.scheduler.dispatcher import GraphDispatcher
from services.engine.scheduler.holdings import Holdings
from services.engine.scheduler.logprobs import attach_logprobs, attach_prompt_logprobs
from services.engine.scheduler.planned_step import PlannedStep, ScheduledStep
from services.engine.scheduler.recovery import Recovery
from services.engine.scheduler.stats import SchedulerCounts
from services.engine.spec_decode.draft_plan import DraftPlan, cut_at_end

__all__ = ["ScheduledStep", "Scheduler"]


class Scheduler:
    """Admits, chunks, preempts and finishes requests.

    Running requests are kept in service order: by arrival, which priority moves. A step gives every
    running request at least one token, prompts as many as the budget leaves, and the rest of the
    budget to requests that wait, in the same order. When no block is free, the last running request
    gives all of its blocks back and starts over later. The first one never has to, so one
    always advances. However many requests of higher priority come, the waiting request that arrived
    first is the next after three of them, and the running prompt that did has a quarter of a step.
    """

    def __init__(
        self,
        limits: StepLimits,
        *,
        num_blocks: int,
        max_num_waiting: int = 1024,
        enable_prefix_caching: bool = True,
        dispatcher: GraphDispatcher | None = None,
        counts: SchedulerCounts | None = None,
        priority_ageing_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without requests and with an empty cache.

        Args:
            limits: of steps and sequences.
            num_blocks: blocks of the worker's KV cache, the null block included.
            max_num_waiting: most requests that wait; more are refused.
            enable_prefix_caching: whether requests share the blocks of common prefixes.
            dispatcher: knows what the worker can replay; by default it can replay nothing.
            counts: of the schedulers before this one.
            priority_ageing_s: seconds of waiting that are worth one step of priority.
            clock: returns the time of `Request.arrival_s`, in seconds.
        """
        self._limits = limits
        self._max_num_waiting = max_num_waiting
        self._enable_prefix_caching = enable_prefix_caching
        self._clock = clock
        self._dispatcher = dispatcher or GraphDispatcher()
        self.counts = counts or SchedulerCounts()
        self._holdings = Holdings(
            limits,
            self.counts,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            priority_ageing_s=priority_ageing_s,
            clock=clock,
        )
        self._recovery = Recovery(
            self._holdings, max_num_batched_tokens=limits.max_num_batched_tokens
        )
        self._drafts: DraftPlan | None = None
        if limits.num_speculative_tokens:
            self._drafts = DraftPlan(
                num_tokens=limits.num_speculative_tokens,
                # The token after all drafts, if they are accepted, is within max_model_len too.
                max_seq_len=min(limits.max_model_len - 1, self._holdings.num_cache_tokens),
            )
        # A request's table has an entry of each group for the tokens of a block.
        self._num_groups = len(limits.windows)
        self._last_step_id = 0
        self._last_result_id = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._holdings.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, for the first time or after a preemption."""
        return len(self._holdings.waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold a row and blocks, in service order."""
        return self._holdings.running

    @property
    def next_step_id(self) -> int:
        """The step that `schedule` plans next."""
        return self._last_step_id + 1

    @property
    def is_speculative(self) -> bool:
        """Whether only the result of a step has its number of tokens."""
        return self._drafts is not None

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._holdings.running or self._holdings.waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._holdings.cache.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content can still be found."""
        return self._holdings.cache.num_cached_blocks

    @property
    def num_batched_tokens_limit(self) -> int:
        """Query tokens that a step may have now."""
        return self._recovery.budget.tokens

    def prefix_changes(self, cursor: PrefixCursor | None, *, max_keys: int) -> PrefixChanges:
        """Returns the cached prefixes added and removed after a cursor; None returns all."""
        return self._holdings.cache.prefix_changes(cursor, max_keys=max_keys)

    def add(self, request: Request) -> None:
        """Takes a new request into the waiting queue.

        It ends with FinishReason.LENGTH at the latest where `Holdings.bound_tokens` says.

        Raises:
            InvalidRequestError: the prompt is too long for the model or for the KV cache, or the
                request has been resumed with nothing left to do.
            QueueFullError: too many requests wait.
        """
        max_num_tokens = self._holdings.bound_tokens(request)
        if len(request.token_ids) >= max_num_tokens:
            raise InvalidRequestError(
                f"the request has {len(request.token_ids)} tokens already; it can have"
                f" {max_num_tokens}"
            )
        num_waiting = len(self._holdings.waiting)
        if num_waiting >= self._max_num_waiting:
            raise QueueFullError(
                f"{num_waiting} requests wait; the limit is {self._max_num_waiting}",
                retry_after_ms=self._holdings.finish_rate.retry_after_ms(self._clock()),
            )
        request.max_num_tokens = max_num_tokens
        self._holdings.enqueue(request)

    def resume(self, request: Request) -> None:
        """Takes over a lost worker's request, which continues after its known tokens.

        Raises:
            InvalidRequestError: it fitted that worker's KV cache and does not fit this one's.
        """
        self._recovery.resume(request)

    def abort(self, request: Request) -> bool:
        """Ends a request without output and frees what it holds; returns whether it was live."""
        if request.status is RequestStatus.FINISHED:
            return False
        if request.status is RequestStatus.RUNNING:
            self._holdings.running.remove(request)
        self._holdings.end(request)
        return True

    def schedule(self) -> ScheduledStep | None:
        """Plans the next step; the worker must run the steps in the order of these calls.

        Returns:
            The step, or None when nothing can run before a result or a request comes in.
        """
        holdings, recovery = self._holdings, self._recovery
        recovery.make_way_for_suspect()
        step = PlannedStep(
            recovery.budget.tokens,
            holdings.row_needs,
            num_spec_steps=self._limits.num_speculative_tokens,
        )
        num_preemptions = self.counts.num_preemptions
        self._continue_running(step)
        if num_preemptions == self.counts.num_preemptions:
            self._admit(step)
        if step.is_empty:
            return None
        self._last_step_id += 1
        ordered = step.order(self._last_step_id, self._dispatcher)
        if recovery.num_failed_steps:
            ordered.descriptor.num_failed_steps = recovery.num_failed_steps
        return ordered

    def update(self, step: ScheduledStep, result: StepResult) -> list[RequestOutput]:
        """Takes the tokens of a step, in the order of the steps, and ends who is done.

        Returns:
            One output for each request that sampled and is still live. One that ended since the
            step was scheduled has sampled in vain.
        """
        self._last_result_id = step.step_id
        self._recovery.budget.count_good_step()
        mark = StepMark(step.step_id, self._clock())
        num_output = 0
        outputs: list[RequestOutput] = []
        is_speculative = self._drafts is not None
        finished = RequestStatus.FINISHED  # Python 3.11 takes 70 ns to look a member up
        for request, token_ids in zip(step.requests, read_tokens(result), strict=True):
            if request.status is finished:
                continue
            request.num_pending_tokens -= 1
            kept = cut_at_end(request, token_ids) if is_speculative else token_ids
            if kept[-1] < 0:
                self._holdings.end(request)
                error = RequestFaultError("the largest of its logits was NaN or infinite")
                outputs.append(RequestOutput(request, [], error=error))
                continue
            request.token_ids += kept
            num_output += len(kept)
            previous = request.last_token
            if previous is None:
                request.first_token = mark
            request.last_token = mark
            outputs.append(RequestOutput(request, kept, previous))
        self.counts.output_tokens += num_output
        if self._drafts is not None:
            self._drafts.settle(step.requests, result)
        self._conclude(outputs)
        self._holdings.drop_ended()
        if step.descriptor.sampling.needs_logprobs:
            attach_logprobs(outputs, step, result)
        if step.prompt_spans:
            attach_prompt_logprobs(outputs, step.prompt_spans, result)
        return outputs

    def retreat(self, steps: Sequence[ScheduledStep]) -> list[RequestOutput]:
        """Takes back a step that ran out of memory and the later ones in flight.

        Returns:
            The outputs of requests that end because of it; see `Recovery.retreat`.
        """
        self._last_result_id = self._last_step_id
        return self._recovery.retreat(steps)

    def _continue_running(self, step: PlannedStep) -> None:
        """Gives every running request its next tokens, preempting the last ones if need be."""
        holdings, drafts = self._holdings, self._drafts
        running, cache, block_size = holdings.running, holdings.cache, self._limits.block_size
        num_groups, decoding = self._num_groups, []
        index = 0
        while index < len(running):  # preemption shortens the list from its end
            request = running[index]
            index += 1
            num_tokens = len(request.token_ids) + request.num_pending_tokens
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is on its way
            num_computed = request.num_computed_tokens
            if (
                num_tokens - num_computed == 1
                and drafts is None
                and request.constraint is None
                and num_computed >= request.num_prompt_tokens
                and num_tokens * num_groups <= len(request.block_ids) * block_size
            ):
                request.num_computed_tokens = num_tokens
                request.num_pending_tokens += 1
                step.budget -= 1
                decoding.append(request)
                continue
            if request.constraint is not None and request.awaits_mask:
                continue
            if drafts is not None and request.num_pending_tokens:
                continue  # it is not known where it will go on
            row = request.row
            assert row is not None, "a running request has a row"
            q_len = num_tokens - num_computed + len(request.draft_token_ids)
            if q_len > 1:
                q_len = step.bound(q_len, running, index - 1)
            num_blocks = len(request.block_ids)
            end = num_computed + q_len
            reach = end if drafts is None else drafts.reach(end)
            if reach * num_groups > num_blocks * block_size:
                cache.cache_full_blocks(request)
                added = holdings.allocate(request, reach)
                if added is None:
                    break  # it gave up its own blocks, having been the last
                step.add_blocks(row, num_blocks, added)
            step.compute(request, row, q_len, num_tokens)
            if q_len > 1:  # prompts are worth sharing at once
                cache.cache_full_blocks(request)
        step.decode(decoding)

    def _admit(self, step: PlannedStep) -> None:
        """Spends what is left of the budget on requests that wait.

        The next one comes in only if blocks for all of its tokens are free, though it may take
        them chunk by chunk: otherwise it would be the first to be preempted, over and over.
        """
        holdings, cache = self._holdings, self._holdings.cache
        max_running = min(self._limits.max_num_seqs, self._recovery.budget.tokens)
        is_in_flight = self._last_result_id != self._last_step_id
        while step.budget and len(holdings.running) < max_running:
            request = holdings.next_waiting()
            if request is None or request.num_pending_tokens or request.awaits_mask:
                break  # tokens of a preempted request that are on their way must be known first
            if not self._recovery.may_join(request, is_in_flight=is_in_flight):
                break
            # Cached tokens have no log-probabilities.
            prefix = [] if request.needs_prompt_logits else cache.match_prefix(request)
            num_prefix_blocks = len(prefix) // self._num_groups
            if self._is_being_computed(request, num_prefix_blocks):
                break
            num_tokens = len(request.token_ids)
            if not cache.fits(prefix, self._reach(num_tokens)):
                break
            row = holdings.start(request, prefix, num_prefix_blocks * self._limits.block_size)
            self._count_admission(request)
            q_len = min(num_tokens - request.num_computed_tokens, step.budget)
            q_len = step.bound_logprobs(request, q_len)
            added = cache.allocate(request, self._reach(request.num_computed_tokens + q_len))
            assert added is not None, "all of its blocks were free"
            step.assign_row(row, request)
            step.add_blocks(row, 0, request.block_ids)
            step.compute(request, row, q_len, num_tokens)
            cache.cache_full_blocks(request)

    def _count_admission(self, request: Request) -> None:
        """Notes when a request first ran, and what of its prompt was cached then."""
        if request.started is None:
            request.started = StepMark(self.next_step_id, self._clock())
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.counts.prompt_tokens += request.num_prompt_tokens
            self.counts.cached_tokens += request.num_cached_tokens

    def _is_being_computed(self, request: Request, num_blocks: int) -> bool:
        """Whether a running request is about to compute the block after a prefix of this one.

        Waiting for it costs less than computing it twice. Outputs of one prompt find its blocks so.
        """
        start = num_blocks * self._limits.block_size
        end = start + self._limits.block_size
        is_alone = not self._enable_prefix_caching or request.needs_prompt_logits
        if is_alone or end >= len(request.token_ids):
            return False
        return any(
            other.num_computed_tokens < end <= len(other.token_ids)
            and other.cache_salt == request.cache_salt
            and other.token_ids[:end] == request.token_ids[:end]
            for other in self._holdings.running
        )

    def _reach(self, end: int) -> int:
        """Returns how many tokens a request's blocks must hold when it computes up to `end`."""
        return end if self._drafts is None else self._drafts.reach(end)

    def _conclude(self, outputs: Sequence[RequestOutput]) -> None:
        """Ends requests that are done with these tokens; the grammars of others advance."""
        for output in outputs:
            if output.error is not None:
                continue
            request, token_id = output.request, output.token_ids[-1]
            if token_id in request.sampling.end_token_ids and _may_stop(request):
                output.finish_reason = FinishReason.STOP
                output.stop_token_id = token_id
                self._holdings.end(request)
            elif len(request.token_ids) >= request.max_num_tokens:
                output.finish_reason = FinishReason.LENGTH
                self._holdings.end(request)
            elif request.constraint is not None:
                request.constraint.advance(token_id)


def _may_stop(request: Request) -> bool:
    """Whether an end token ends the request."""
    return request.num_output_tokens > request.sampling.min_tokens
