"""Decides which request computes which tokens in the next step.

Steps overlap: the next one is scheduled before the last results are back. A token counts as
computed once a step with it is sent. Tokens that steps in flight sample are pending: the worker has
them, the scheduler does not know them yet. services.engine.kv_cache.cache explains why blocks and
rows may get new owners meanwhile.

With speculative decoding a step returns one or more tokens per request. Where the worker makes the
drafts, the next step is scheduled before that number is known, for the most tokens that it can be:
the request is carried. If a request cannot be, no step is scheduled until the result is back, so
that requests stay together; see docs/decisions/0006-drafts-and-two-steps-in-flight.md.

With several pipeline stages a request is scheduled again only after its result is back: only the
last stage has the token. There the steps on their way share the requests.
"""

import time
from collections.abc import Callable, Sequence

from services.engine.batch import BatchDescriptor, StepResult, read_tokens
from services.engine.errors import InvalidRequestError, QueueFullError, RequestFaultError
from services.engine.kv_cache.prefix_journal import PrefixChanges, PrefixCursor, PrefixJournal
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
from services.engine.scheduler.stats import RankLoad, SchedulerCounts
from services.engine.spec_decode.carried_drafts import CarriedDrafts
from services.engine.spec_decode.draft_length import choice_of
from services.engine.spec_decode.draft_plan import DraftPlan, cut_at_end

__all__ = ["ScheduledStep", "Scheduler"]


class Scheduler:
    """Admits, chunks, preempts and finishes requests.

    Running requests are in service order: by arrival, shifted by priority. A step gives every
    running request at least one token, prompts as many as the budget leaves, and the rest to
    waiting requests in the same order. When no block is free, the last running request frees all of
    its blocks and starts over later; the first is never preempted, so one request always advances.
    Priority cannot starve the oldest requests: the waiting request that arrived first is next after
    three overtakings, and the oldest running prompt has a quarter of each step.
    """

    def __init__(  # noqa: PLR0913  # settings, most of which have defaults
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
        journal: PrefixJournal | None = None,
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
            journal: takes the changes of cached prefixes; by default one of its own.
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
            journal=journal,
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
                num_written_ahead=limits.num_written_ahead,
                lookup_sizes=limits.lookup_sizes,
                # Data-parallel ranks have equally many drafts, which the caller chooses.
                length=None if limits.data_parallel_size > 1 else choice_of(limits.draft_lengths),
                rows=None
                if limits.lookup_sizes
                else CarriedDrafts(
                    max_num_seqs=limits.max_num_seqs, num_drafts=limits.num_speculative_tokens
                ),
            )
        self._num_stages = limits.num_stages
        # A request's table has an entry of each group for the tokens of a block.
        self._num_groups = len(limits.windows)
        self._last_step_id = 0
        self._last_result_id = 0

    @property
    def num_running(self) -> int:
        """Requests with a row and blocks."""
        return len(self._holdings.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, for the first time or after a preemption."""
        return len(self._holdings.waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Requests with a row and blocks, in service order."""
        return self._holdings.running

    @property
    def next_step_id(self) -> int:
        """Id of the step that `schedule` plans next."""
        return self._last_step_id + 1

    @property
    def num_stages(self) -> int:
        """Pipeline stages, which run as many steps at a time."""
        return self._num_stages

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
        """Free blocks that the prefix cache can still find."""
        return self._holdings.cache.num_cached_blocks

    @property
    def must_wait(self) -> bool:
        """Whether `schedule` plans nothing before a result is back, as drafts depend on it."""
        drafts = self._drafts
        return drafts is not None and any(map(drafts.must_wait, self._holdings.running))

    @property
    def num_batched_tokens_limit(self) -> int:
        """Most query tokens of a step at present."""
        return self._recovery.budget.tokens

    def rank_loads(self) -> list[RankLoad]:
        """Returns nothing: there is one data-parallel rank."""
        return []

    def prefix_changes(self, cursor: PrefixCursor | None, *, max_keys: int) -> PrefixChanges:
        """Returns the cached prefixes added and removed after a cursor; all for None."""
        return self._holdings.cache.prefix_changes(cursor, max_keys=max_keys)

    def room_after(self, request: Request) -> int:
        """Returns the free blocks after all requests and this new one have those of their tokens.

        Negative if some must wait. Blocks with its prefix are no loss.
        """
        holdings, size = self._holdings, self._limits.block_size
        live = (*holdings.running, *holdings.waiting)
        num_wanted = sum(-(-len(each.token_ids) // size) for each in (*live, request))
        num_held = sum(len(each.block_ids) for each in live)
        num_held += len(holdings.cache.match_prefix(request))
        return holdings.cache.num_free_blocks - num_wanted * self._num_groups + num_held

    def add(self, request: Request, *, num_waiting_elsewhere: int = 0) -> None:
        """Adds a new request to the waiting queue.

        It ends with FinishReason.LENGTH at the latest where `Holdings.bound_tokens` says.

        Args:
            request: the new one.
            num_waiting_elsewhere: requests that wait at other schedulers of the engine.

        Raises:
            InvalidRequestError: the prompt is too long for the model or the KV cache, or a resumed
                request has nothing left to do.
            QueueFullError: too many requests wait.
        """
        max_num_tokens = self._holdings.bound_tokens(request)
        if len(request.token_ids) >= max_num_tokens:
            raise InvalidRequestError(
                f"the request has {len(request.token_ids)} tokens already; it can have"
                f" {max_num_tokens}"
            )
        num_waiting = len(self._holdings.waiting) + num_waiting_elsewhere
        if num_waiting >= self._max_num_waiting:
            raise QueueFullError(
                f"{num_waiting} requests wait; the limit is {self._max_num_waiting}",
                retry_after_ms=self._holdings.finish_rate.retry_after_ms(self._clock()),
            )
        request.max_num_tokens = max_num_tokens
        self._holdings.enqueue(request)

    def resume(self, request: Request) -> None:
        """Adds a request of a lost worker, which continues after its known tokens.

        Raises:
            InvalidRequestError: it does not fit this worker's KV cache.
        """
        self._recovery.resume(request)

    def abort(self, request: Request) -> bool:
        """Ends a request without output; returns whether it was live."""
        if request.status is RequestStatus.FINISHED:
            return False
        if request.status is RequestStatus.RUNNING:
            self._holdings.running.remove(request)
        self._holdings.end(request)
        return True

    def schedule(self, *, num_next_drafts: int | None = None) -> ScheduledStep | None:
        """Plans the next step; the worker must run steps in the order of these calls.

        Args:
            num_next_drafts: drafts of each request after the step, where data-parallel ranks have
                equally many; by default the scheduler chooses.

        Returns:
            None if nothing can run before a result or a request comes in.
        """
        holdings, recovery = self._holdings, self._recovery
        if self.must_wait:
            return None
        recovery.make_way_for_suspect()
        if num_next_drafts is None:
            drafts, num_running = self._drafts, len(holdings.running)
            num_next_drafts = 0 if drafts is None else drafts.choose(num_running)
        step = PlannedStep(
            recovery.budget.tokens,
            holdings.row_needs,
            num_spec_steps=self._limits.num_speculative_tokens,
            num_next_drafts=num_next_drafts,
            max_decodes=self._share_of_decodes(),
            last_tokens_travel=self._num_stages > 1,
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

    def idle_step(self) -> ScheduledStep:
        """Returns a step without requests, for when other data-parallel ranks have some."""
        self._last_step_id += 1
        descriptor = BatchDescriptor(
            step_id=self._last_step_id, num_failed_steps=self._recovery.num_failed_steps
        )
        return ScheduledStep(
            step_id=self._last_step_id, descriptor=descriptor, requests=[], unsampled=[]
        )

    def update(self, step: ScheduledStep, result: StepResult) -> list[RequestOutput]:
        """Takes the result of the oldest step in flight and ends finished requests.

        Returns:
            One output for each request that sampled and is still live.
        """
        self._last_result_id = step.step_id
        self._recovery.budget.count_good_step()
        if self._drafts is not None:
            self._drafts.complete(step.descriptor, result)
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
            metadata = step.descriptor.spec_decode_metadata
            self._drafts.observe(step.descriptor, result)
            self._drafts.settle(step.requests, step.num_drafts, result, metadata.num_next_drafts)
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

    def _share_of_decodes(self) -> int | None:
        """Returns the most decodes of a step, so that each stage has some; None with one stage."""
        if self._num_stages == 1:
            return None
        num_decodes = sum(
            request.num_computed_tokens >= request.num_prompt_tokens
            for request in self._holdings.running
        )
        return -(-num_decodes // self._num_stages)

    def _continue_running(self, step: PlannedStep) -> None:
        """Gives every running request its next tokens; preempts the last ones if blocks run out."""
        holdings, drafts = self._holdings, self._drafts
        running, cache, block_size = holdings.running, holdings.cache, self._limits.block_size
        num_groups, decoding = self._num_groups, []
        has_stages = self._num_stages > 1
        index = 0
        while index < len(running):  # preemption shortens the list from its end
            request = running[index]
            index += 1
            num_tokens = len(request.token_ids) + request.num_pending_tokens
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is pending
            if has_stages and _must_wait(request, step):
                continue
            num_tokens += request.num_pending_drafts
            num_computed = request.num_computed_tokens
            if (
                num_tokens - num_computed == 1
                and drafts is None
                and (request.constraint is None or not request.needs_mask)
                and num_computed >= request.num_prompt_tokens
                and num_tokens * num_groups <= len(request.block_ids) * block_size
            ):
                request.num_computed_tokens = num_tokens
                request.num_pending_tokens += 1
                step.budget -= 1
                decoding.append(request)
                continue
            if request.awaits_mask:
                continue
            row = request.row
            assert row is not None, "a running request has a row"
            q_len = num_tokens - num_computed + request.num_drafts
            if q_len > 1:
                q_len = step.bound(q_len, running, index - 1)
            num_blocks = len(request.block_ids)
            end = num_computed + q_len
            reach = end if drafts is None else drafts.reach(end)
            if reach * num_groups > num_blocks * block_size:
                cache.cache_full_blocks(request)
                added = holdings.allocate(request, reach)
                if added is None:
                    break  # it was the last and was preempted itself
                step.add_blocks(row, num_blocks, added)
            step.compute(request, row, q_len, num_tokens)
            if q_len > 1:  # share prompts at once
                cache.cache_full_blocks(request)
        step.decode(decoding)

    def _admit(self, step: PlannedStep) -> None:
        """Spends the remaining budget on waiting requests.

        A request is admitted only if blocks for all of its tokens are free, even if it takes them
        chunk by chunk: otherwise it would be preempted again and again.
        """
        holdings, cache = self._holdings, self._holdings.cache
        max_running = min(self._limits.max_num_seqs, self._recovery.budget.tokens)
        is_in_flight = self._last_result_id != self._last_step_id
        while step.budget and len(holdings.running) < max_running:
            request = holdings.next_waiting()
            if request is None or request.num_pending_tokens or request.awaits_mask:
                break  # pending tokens of a preempted request must be known first
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
        """Records a request's first run and how much of its prompt was cached."""
        if request.started is None:
            request.started = StepMark(self.next_step_id, self._clock())
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.counts.prompt_tokens += request.num_prompt_tokens
            self.counts.cached_tokens += request.num_cached_tokens

    def _is_being_computed(self, request: Request, num_blocks: int) -> bool:
        """Whether a running request is about to compute the next block of this one.

        Waiting for it costs less than computing it twice; the outputs of one prompt share blocks
        this way.
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
        """Returns how many tokens a request's blocks must hold to compute up to `end`."""
        return end if self._drafts is None else self._drafts.reach(end)

    def _conclude(self, outputs: Sequence[RequestOutput]) -> None:
        """Ends requests that are done with these tokens and advances the grammars of others."""
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
                for each in output.token_ids:
                    request.constraint.advance(each)
                # The last token decides which drafts may follow.
                num_drafts = max(0, request.constraint.num_free_tokens - 1)
                del request.draft_token_ids[num_drafts:]


def _must_wait(request: Request, step: PlannedStep) -> bool:
    """Returns whether a running request is for a later step, where stages need the last tokens."""
    if request.num_pending_tokens:
        return True  # its next position, or its next token, is unknown
    if step.max_decodes is None or request.num_computed_tokens < request.num_prompt_tokens:
        return False
    if request.awaits_mask or not step.max_decodes:
        return True
    step.max_decodes -= 1
    return False


def _may_stop(request: Request) -> bool:
    return request.num_output_tokens > request.sampling.min_tokens
