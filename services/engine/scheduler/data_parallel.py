"""Plans the steps of data-parallel ranks together: each has requests and a cache of its own.

The ranks share the experts, so all run a step at the same time, with equally many rows; a rank
without requests gets an idle step.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from services.engine.batch import BatchDescriptor, DPMetadata, StepResult, ordered_mode, pack_int32
from services.engine.kv_cache.prefix_journal import PrefixChanges, PrefixCursor
from services.engine.request import Request, RequestOutput, RequestStatus
from services.engine.scheduler.dispatcher import BatchShape, GraphDispatcher
from services.engine.scheduler.planned_step import ScheduledStep
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.stats import RankLoad
from services.engine.scheduler.step_outputs import StepOutputs
from services.engine.spec_decode.draft_length import choice_of
from services.engine.spec_decode.draft_plan import most_drafts, observe

AnyScheduler: TypeAlias = "Scheduler | DataParallelScheduler"


class DataParallelScheduler:
    """The schedulers of all ranks, used like one.

    A new request goes to the rank that has most free blocks after it. Where a rank has the blocks
    of its prefix they count as free, so a long prefix finds its rank and a short one, which many
    requests have, does not bring them all to the same.
    """

    num_stages = 1

    def __init__(
        self,
        ranks: Sequence[Scheduler],
        dispatcher: GraphDispatcher,
        *,
        draft_lengths: Sequence[int] = (0,),
    ) -> None:
        """Starts without requests.

        Args:
            ranks: each rank's scheduler, which knows no graphs.
            dispatcher: knows the graphs, which all ranks have.
            draft_lengths: numbers of drafts that a step may have for each request, ascending.
        """
        self._ranks = tuple(ranks)
        self.tiers = tuple(tiers for each in ranks for tiers in each.tiers)
        """The tiers below the GPU of each rank."""
        self.holdings = tuple(holdings for each in ranks for holdings in each.holdings)
        """The requests of each rank, for changes between two steps."""
        self._dispatcher = dispatcher
        self._most_drafts = draft_lengths[-1]
        self._draft_length = choice_of(draft_lengths)
        self._suspects: list[Request] = []
        slots = {id(each.adapters) for each in self.holdings}
        self._slots = self.holdings[0].adapters if len(slots) == 1 else None
        """Slots of all ranks, where each rank's experts compute the tokens of all."""

    @property
    def num_running(self) -> int:
        """Requests with a row and blocks."""
        return sum(each.num_running for each in self._ranks)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, for the first time or after a preemption."""
        return sum(each.num_waiting for each in self._ranks)

    @property
    def running(self) -> Sequence[Request]:
        """Requests with a row and blocks, rank after rank."""
        return [request for each in self._ranks for request in each.running]

    @property
    def next_step_id(self) -> int:
        """Id of the step that `schedule` plans next."""
        return self._ranks[0].next_step_id

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return any(each.has_work for each in self._ranks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return sum(each.num_free_blocks for each in self._ranks)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that the prefix caches can still find."""
        return sum(each.num_cached_blocks for each in self._ranks)

    @property
    def num_snapshots(self) -> int:
        """Snapshots of states that requests can start from, of all ranks."""
        return sum(each.num_snapshots for each in self._ranks)

    @property
    def adapter_slots(self) -> Mapping[bytes, int]:
        """The slot of each adapter on any rank's device, of the first that has it."""
        return ChainMap(*(dict(each.adapter_slots) for each in self._ranks))

    def adapter_slot(self, request: Request) -> int:
        """Returns one more than the slot of a running request's adapter, 0 without one."""
        return self._ranks[request.data_parallel_rank].adapter_slot(request)

    @property
    def num_batched_tokens_limit(self) -> int:
        """Most query tokens of a rank's step at present."""
        return min(each.num_batched_tokens_limit for each in self._ranks)

    def rank_loads(self) -> list[RankLoad]:
        """Returns each rank's load."""
        return [
            RankLoad(
                num_running=each.num_running,
                num_waiting=each.num_waiting,
                num_free_blocks=each.num_free_blocks,
            )
            for each in self._ranks
        ]

    def prefix_changes(self, cursor: PrefixCursor | None, *, max_keys: int) -> PrefixChanges:
        """Returns the prefixes that any rank has since a cursor, or has no more; all for None."""
        return self._ranks[0].prefix_changes(cursor, max_keys=max_keys)

    def add(self, request: Request) -> None:
        """Adds a new request to a rank's waiting queue; see `Scheduler.add`.

        Raises:
            InvalidRequestError: it can never run.
            QueueFullError: too many requests wait, at all ranks together.
        """
        rank = self._assign(request)
        rank.add(request, num_waiting_elsewhere=self.num_waiting - rank.num_waiting)

    def resume(self, request: Request) -> None:
        """Adds a request of a lost worker, which continues after its known tokens.

        All suspects go to the first rank, which runs one at a time.

        Raises:
            InvalidRequestError: it does not fit this worker's KV cache.
        """
        if request.is_suspect:
            request.data_parallel_rank = 0
            self._ranks[0].resume(request)
            self._suspects.append(request)
        else:
            self._assign(request).resume(request)

    def abort(self, request: Request) -> bool:
        """Ends a request without output; returns whether it was live."""
        return self._ranks[request.data_parallel_rank].abort(request)

    def schedule(self) -> ScheduledStep | None:
        """Plans the next step of every rank; all must run them in the order of these calls.

        All steps make equally many drafts: each takes part in the experts of draft layers.

        Returns:
            The first rank's step, with the others'; None if no rank can run a request, or if one
            must wait for a result: a step without its requests would take as long.
        """
        if any(each.must_wait for each in self._ranks):
            return None
        if self._slots is not None:
            self._slots.begin_step()
        num_allowed = len(self._ranks)
        if self._suspects:
            self._suspects = [
                each
                for each in self._suspects
                if each.is_suspect and each.status is not RequestStatus.FINISHED
            ]
            # The other ranks share a worker's end with a suspect, so they wait.
            num_allowed = 1 if self._suspects else num_allowed
        num_next = self._num_next_drafts()
        planned = [each.schedule(num_next_drafts=num_next) for each in self._ranks[:num_allowed]]
        if not any(planned):
            # A request that is gone may have kept others from their slots.
            is_dropped = self._slots is not None and self._slots.is_claim_dropped
            return self.schedule() if is_dropped else None
        planned += [None] * (len(self._ranks) - num_allowed)
        first, *others = (
            step or rank.idle_step() for rank, step in zip(self._ranks, planned, strict=True)
        )
        if self._slots is not None:
            _order_loads([each.descriptor for each in (first, *others)])
        self._order_together([first, *others], num_next)
        return replace(first, others=others)

    def update(self, step: ScheduledStep, result: StepResult) -> StepOutputs:
        """Takes the results of the oldest step in flight, of all ranks."""
        outputs = StepOutputs()
        steps, results = (step, *step.others), (result, *result.across_dp)
        for rank, part, told in zip(self._ranks, steps, results, strict=True):
            of_rank = rank.update(part, told)
            outputs.columns += of_rank.columns
            outputs.others += of_rank.others
        if self._draft_length is not None:
            observe(
                self._draft_length,
                [(part.descriptor, told) for part, told in zip(steps, results, strict=True)],
            )
        return outputs

    def retreat(self, steps: Sequence[ScheduledStep]) -> list[RequestOutput]:
        """Takes back a step that ran out of memory on all ranks, and the later ones in flight."""
        parts = zip(*((step, *step.others) for step in steps), strict=True)
        outputs: list[RequestOutput] = []
        for rank, own in zip(self._ranks, parts, strict=True):
            outputs += rank.retreat(own)
        return outputs

    def drop_cache(self) -> None:
        """Preempts all requests and forgets all blocks, of every rank; no step is out."""
        for each in self._ranks:
            each.drop_cache()

    def _assign(self, request: Request) -> Scheduler:
        """Chooses a request's rank."""
        rooms = [each.room_after(request) for each in self._ranks]
        loads = [each.num_running + each.num_waiting for each in self._ranks]
        numbers = range(len(self._ranks))
        request.data_parallel_rank = min(numbers, key=lambda rank: (-rooms[rank], loads[rank]))
        return self._ranks[request.data_parallel_rank]

    def _num_next_drafts(self) -> int:
        """Returns the drafts of each request of any rank after the next step."""
        if self._draft_length is None:
            return self._most_drafts
        most = most_drafts(chain.from_iterable(r.running for r in self._ranks), self._most_drafts)
        return self._draft_length.choose(max(each.num_running for each in self._ranks), most=most)

    def _order_together(self, steps: Sequence[ScheduledStep], num_next_drafts: int) -> None:
        """Sets what all ranks know in each step: tokens, drafts, and the graph if one fits all.

        One graph for all ranks means equally many rows: as many as its size.
        """
        contexts = [step.descriptor.context for step in steps]
        if not any(each.batch_size for each in contexts):
            return  # they only copy blocks
        shapes = [
            BatchShape(
                num_tokens=context.num_tokens,
                batch_size=context.batch_size,
                max_q_len=context.max_q_len,
                sees_images=step.sees_images,
            )
            for step, context in zip(steps, contexts, strict=True)
            if context.batch_size
        ]
        dispatch = self._dispatcher.dispatch(BatchShape.of_all(shapes))
        metadata = DPMetadata(
            num_tokens_across_dp=pack_int32([each.num_tokens for each in contexts])
        )
        if self._most_drafts:
            metadata.num_sampling_across_dp = pack_int32([len(step.requests) for step in steps])
        has_adapters = any(each.has_adapters for each in self._ranks)
        for step in steps:
            descriptor = step.descriptor
            descriptor.dp_metadata.CopyFrom(metadata)
            if self._most_drafts:  # idle steps have none yet
                descriptor.spec_decode_metadata.num_spec_steps = self._most_drafts
                descriptor.spec_decode_metadata.num_next_drafts = num_next_drafts
            descriptor.cudagraph_runtime_mode = ordered_mode(dispatch.graph_key)
            descriptor.fallback_reason = dispatch.fallback_reason
        if dispatch.graph_key is not None:
            descriptors = [step.descriptor for step in steps]
            self._dispatcher.order_forms(descriptors, dispatch.graph_key, has_adapters=has_adapters)


def _order_loads(descriptors: Sequence[BatchDescriptor]) -> None:
    """Has all ranks load the adapters of each of them, in the order of the ranks."""
    loads = [load for each in descriptors for load in each.adapter_loads]
    for descriptor in descriptors if loads else ():
        del descriptor.adapter_loads[:]
        descriptor.adapter_loads.extend(loads)
