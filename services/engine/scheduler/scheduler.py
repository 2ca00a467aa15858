"""Decides which request computes which tokens in the next step.

Steps overlap: the next one is scheduled before the last results are back. A token counts as
computed once a step with it is sent. Tokens that steps in flight sample are pending: the worker has
them, the scheduler does not know them yet. services.engine.kv_cache.cache explains why blocks and
rows may get new owners meanwhile.

With speculative decoding a step returns one or more tokens per request. Where the worker makes the
drafts, the next step is scheduled before that number is known, for the most tokens that it can be:
the request is carried. If a request cannot be, no step is scheduled until the result is back, so
that requests stay together; see docs/decisions/0006-drafts-and-two-steps-in-flight.md.

With several pipeline stages the steps in flight share the requests; see continuation.PipelineShare.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from services.engine.batch import BatchDescriptor, StepResult
from services.engine.errors import InvalidRequestError, QueueFullError
from services.engine.kv_cache.host_tier import HostLimits
from services.engine.kv_cache.prefix_journal import BlockJournal, PrefixChanges, PrefixCursor
from services.engine.limits import StepLimits
from services.engine.request import Request, RequestOutput, RequestStatus
from services.engine.scheduler.adapter_slots import AdapterSlots
from services.engine.scheduler.admission import Admission
from services.engine.scheduler.block_pairs import pack_copies
from services.engine.scheduler.continuation import continue_running
from services.engine.scheduler.dispatcher import GraphDispatcher
from services.engine.scheduler.holdings import Holdings
from services.engine.scheduler.logprobs import attach_logprobs, attach_prompt_logprobs
from services.engine.scheduler.mixed_step import most_tokens
from services.engine.scheduler.planned_drafts import plan_drafts
from services.engine.scheduler.planned_step import PlannedStep, ScheduledStep
from services.engine.scheduler.pooled_requests import end_pooled
from services.engine.scheduler.recovery import Recovery
from services.engine.scheduler.sampled_tokens import append_tokens, conclude
from services.engine.scheduler.shared_prefixes import SharedPrefixFinder
from services.engine.scheduler.stats import RankLoad, SchedulerCounts
from services.engine.scheduler.step_outputs import StepOutputs
from services.engine.scheduler.tier_orders import TierOrders

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
        journal: BlockJournal | None = None,
        host: HostLimits | None = None,
        adapters: AdapterSlots | None = None,
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
            journal: notes the blocks that can be found; by default one of its own.
            host: the worker's memory for blocks that are reused; None without.
            adapters: the slots that data-parallel ranks share; by default slots of its own.
        """
        self._limits = limits
        enable_prefix_caching = enable_prefix_caching and limits.shares_prefixes
        self._max_num_waiting = max_num_waiting
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
            host=host,
            adapters=adapters,
        )
        self._tiers = TierOrders(self._holdings)
        self.tiers = (self._tiers,)
        """The tiers below the GPU of each data-parallel rank."""
        self.holdings = (self._holdings,)
        self._recovery = Recovery(
            self._holdings,
            self._tiers,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            min_num_tokens=limits.min_step_tokens,
        )
        self._prefixes = SharedPrefixFinder(limits)
        self._drafts = plan_drafts(limits, self._holdings.num_cache_tokens)
        self._admission = Admission(
            limits,
            self._holdings,
            self._recovery,
            drafts=self._drafts,
            enable_prefix_caching=enable_prefix_caching,
            clock=clock,
        )
        self._last_step_id = 0
        self._last_result_id = 0

    @property
    def num_running(self) -> int:
        """Requests with a row and blocks."""
        return len(self._holdings.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, for the first time or after a preemption."""
        return self._holdings.num_waiting

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
        return self._limits.num_stages

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._holdings.running or self._holdings.num_waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._holdings.cache.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that the prefix cache can still find."""
        return self._holdings.cache.num_cached_blocks

    @property
    def num_snapshots(self) -> int:
        """Snapshots of states that requests can start from."""
        states = self._holdings.cache.states
        return 0 if states is None else len(states.index)

    @property
    def adapter_slots(self) -> Mapping[bytes, int]:
        """The slot of each adapter on the device, by its digest."""
        return self._holdings.adapters.by_digest

    @property
    def has_adapters(self) -> bool:
        """Whether a running request has an adapter."""
        return self._holdings.adapters.are_used

    def adapter_slot(self, request: Request) -> int:
        """Returns one more than the slot of a running request's adapter, 0 without one."""
        return self._holdings.adapters.slot_of(request.adapter)

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
        """Returns the blocks that a new request would leave free; see `Holdings.room_after`."""
        return self._holdings.room_after(request)

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
        num_waiting = self._holdings.num_waiting + num_waiting_elsewhere
        if num_waiting >= self._max_num_waiting:
            raise QueueFullError(
                f"{num_waiting} requests wait; the limit is {self._max_num_waiting}",
                retry_after_ms=self._holdings.finish_rate.retry_after_ms(self._clock()),
            )
        request.max_num_tokens = max_num_tokens
        self._tiers.enqueue(request)

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
        self._tiers.begin_step()
        recovery.make_way_for_suspect()
        most = most_tokens(budget := recovery.budget.tokens, self._limits, holdings)
        holdings.images.begin_step(most_short=most if most < budget else None)
        if num_next_drafts is None:
            num_next_drafts = 0 if self._drafts is None else self._drafts.choose(holdings.running)
        step = PlannedStep(
            most,
            holdings.row_needs,
            holdings.images,
            num_spec_steps=self._limits.num_speculative_tokens,
            num_next_drafts=num_next_drafts,
            last_tokens_travel=self._limits.num_stages > 1,
        )
        num_preemptions = self.counts.num_preemptions
        continue_running(step, holdings, self._limits, self._drafts)
        if num_preemptions == self.counts.num_preemptions:
            is_in_flight = self._last_result_id != self._last_step_id
            self._admission.admit(step, step_id=self.next_step_id, is_in_flight=is_in_flight)
        if step.is_empty and holdings.images.are_awaited:
            return self.schedule(num_next_drafts=num_next_drafts)  # there is nothing beside them
        if step.is_empty:
            return self.idle_step() if self._tiers.has_copies else None
        self._last_step_id += 1
        ordered = step.order(self._last_step_id, self._dispatcher)
        self._prefixes.order(ordered.descriptor, holdings)
        self._dispatcher.order_form(ordered.descriptor, has_adapters=self.has_adapters)
        self._order_copies(ordered.descriptor)
        return ordered

    def drop_cache(self) -> None:
        """Preempts all requests and forgets all blocks, whose memory is lost; no step is out."""
        self._recovery.drop_cache()

    def _order_copies(self, descriptor: BatchDescriptor) -> None:
        """Adds to a step what it copies before it computes."""
        if copies := self._holdings.cache.take_copies():
            descriptor.state_metadata.CopyFrom(pack_copies(copies))
        self._tiers.order(descriptor)
        for slot, digest in self._holdings.adapters.take_loads():
            descriptor.adapter_loads.add(slot=slot, digest=digest)
        descriptor.num_failed_steps = self._recovery.num_failed_steps

    def idle_step(self) -> ScheduledStep:
        """Returns a step without requests: of copies alone, or as data-parallel ranks have some."""
        step_id = self._last_step_id = self.next_step_id
        descriptor = BatchDescriptor(step_id=step_id)
        self._order_copies(descriptor)
        return ScheduledStep(step_id=step_id, descriptor=descriptor, requests=[], unsampled=[])

    def update(self, step: ScheduledStep, result: StepResult) -> StepOutputs:
        """Takes the result of the oldest step in flight and ends finished requests.

        Returns:
            One output for each request that sampled, or got its vector, and is still live.
        """
        self._last_result_id = step.step_id
        self._recovery.budget.count_good_step()
        holdings, drafts = self._holdings, self._drafts
        self._tiers.observe(step, result)
        if not step.has_requests:
            return StepOutputs()
        if self._limits.pooling is not None:
            return StepOutputs(others=end_pooled(step, result, holdings, at_s=self._clock()))
        if drafts is not None:
            drafts.complete(step.descriptor, result)
        outputs = append_tokens(
            step, result, holdings, is_speculative=drafts is not None, at_s=self._clock()
        )
        if drafts is not None:
            drafts.observe(step.descriptor, result)
            num_next = step.descriptor.spec_decode_metadata.num_next_drafts
            drafts.settle(step.requests, step.num_drafts, result, num_next)
            holdings.cache.settle(step.requests)
        conclude(outputs.others, holdings)
        holdings.drop_ended()
        if step.descriptor.sampling.needs_logprobs:
            attach_logprobs(outputs.others, step, result)
        if step.prompt_spans:
            attach_prompt_logprobs(outputs.others, step.prompt_spans, result)
        return outputs

    def retreat(self, steps: Sequence[ScheduledStep]) -> list[RequestOutput]:
        """Takes back a step that ran out of memory and the later ones in flight.

        Returns:
            The outputs of requests that end because of it; see `Recovery.retreat`.
        """
        self._last_result_id = self._last_step_id
        return self._recovery.retreat(steps)
