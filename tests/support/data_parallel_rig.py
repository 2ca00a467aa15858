"""The schedulers of data-parallel ranks, each in front of a fake worker."""

from collections import deque

from services.engine.batch import GraphKind, StepFailure, num_rows, read_int32
from services.engine.kv_cache.block_events import BlockEvents
from services.engine.kv_cache.prefix_journal import BlockJournal, JointPrefixJournal
from services.engine.limits import StepLimits
from services.engine.request import Request
from services.engine.scheduler.adapter_slots import AdapterSlots
from services.engine.scheduler.data_parallel import DataParallelScheduler
from services.engine.scheduler.dispatcher import GraphDispatcher
from services.engine.scheduler.scheduler import ScheduledStep, Scheduler
from services.engine.scheduler.stats import SchedulerCounts
from tests.support.fake_model import VOCAB_SIZE, require
from tests.support.fake_worker import FakeWorker

BLOCK_SIZE = 4


class DataParallelRig:
    """Ranks whose steps a test runs one by one; each step is checked to be one for all ranks."""

    def __init__(
        self,
        num_ranks=2,
        *,
        num_blocks=33,
        max_num_waiting=8,
        dispatcher=None,
        shares_slots=False,
        **limits,
    ) -> None:
        """Starts without requests; shares_slots: whether ranks have the same adapters in slots."""
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | limits
        self.limits = StepLimits(
            **sizes, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, data_parallel_size=num_ranks
        )
        joint = JointPrefixJournal()
        slots = AdapterSlots(self.limits.num_adapter_slots, SchedulerCounts())
        self.events = [BlockEvents() for _ in range(num_ranks)]
        self.ranks = [
            Scheduler(
                self.limits,
                num_blocks=num_blocks,
                max_num_waiting=max_num_waiting,
                journal=BlockJournal(joint, events),
                clock=lambda: 100.0,
                adapters=slots if shares_slots else None,
            )
            for events in self.events
        ]
        self.scheduler = DataParallelScheduler(
            self.ranks,
            dispatcher or GraphDispatcher(),
            draft_lengths=self.limits.draft_lengths,
        )
        self.workers = [
            FakeWorker(
                max_num_seqs=self.limits.max_num_seqs,
                max_model_len=self.limits.max_model_len,
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                makes_drafts=self.limits.lookup_sizes is None,
            )
            for _ in range(num_ranks)
        ]
        self.in_flight: deque[ScheduledStep] = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def send(self) -> ScheduledStep | None:
        step = self.scheduler.schedule()
        if step is not None:
            self.in_flight.append(step)
            self._check(step)
        return step

    def receive(self):
        step = self.in_flight.popleft()
        result, *others = (
            worker.execute(part.descriptor)
            for worker, part in zip(self.workers, (step, *step.others), strict=True)
        )
        result.across_dp.extend(others)
        if result.failure == StepFailure.STEP_FAILURE_SKIPPED:
            return []
        if result.failure:
            return self.scheduler.retreat([step, *self.in_flight])
        outputs = list(self.scheduler.update(step, result))
        for output in outputs:
            output.request.sink.put(output)
        return outputs

    def run(self, *, depth: int = 2) -> None:
        """Runs until no request is left, with `depth` steps in flight."""
        while self.scheduler.has_work or self.in_flight:
            if len(self.in_flight) == depth or self.send() is None:
                self.receive()

    def _check(self, step: ScheduledStep) -> None:
        """Requires what the ranks' collectives rely on."""
        orders = [part.descriptor for part in (step, *step.others)]
        counts = [order.context.num_tokens for order in orders]
        require(len({order.step_id for order in orders}) == 1, "one number of the step")
        sizes = {
            (key.kind, key.num_tokens, key.graph_bs, key.max_q_len)
            for key in (order.graph_key for order in orders)
        }
        require(len(sizes) == 1, "graphs of one size")
        if self.limits.num_speculative_tokens:
            self._check_drafts(step)
        for order in orders:
            across = read_int32(order.dp_metadata.num_tokens_across_dp).tolist()
            require(across == counts, f"tokens of {counts}, not {across}")
            if order.HasField("graph_key"):
                require(order.graph_key.num_tokens >= num_rows(order), "room in the graph")

    def _check_drafts(self, step: ScheduledStep) -> None:
        """Requires that all ranks run as many draft passes, of as many rows."""
        parts = (step, *step.others)
        orders = [part.descriptor for part in parts]
        num_sampling = [len(part.requests) for part in parts]
        made = {order.spec_decode_metadata.num_next_drafts for order in orders}
        require(len(made) == 1, "as many drafts on all ranks")
        for order in orders:
            across = read_int32(order.dp_metadata.num_sampling_across_dp).tolist()
            require(across == num_sampling, f"requests that sample are {num_sampling}: {across}")
            key = order.graph_key
            if key.kind == GraphKind.GRAPH_KIND_DECODE and order.context.batch_size:
                num_tokens = order.context.batch_size * key.max_q_len
                require(order.context.num_tokens == num_tokens, "a batch that fits the graph")
