"""A FakeWorker with an executor's interface, in place of a worker process."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from protos.engine.v1.worker_pb2 import (
    OrderAnswer,
    ProfileEnd,
    ProfileReport,
    ProfileStart,
    ProfileStarted,
    ProfileStop,
    RankInfo,
    WorkerCommand,
    WorkerReady,
)
from services.engine.batch import BatchDescriptor, StepResult, read_int32
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.rank_orders import RankOrders
from services.engine.worker.rank_process import WorkerDiedError, WorkerKilledError
from tests.support.fake_worker import VOCAB_SIZE, FakeWorker


class FakeExecutor:
    """Stands in for WorkerExecutor: a FakeWorker with the same asynchronous interface.

    A test can end it with die(), freeze it with hang() and thaw it with resume(). With a number of
    steps it freezes by itself, so that running requests cannot end during a test.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int = 64,
        max_model_len: int = 256,
        vocab_size: int = VOCAB_SIZE,
        step_time_s: float = 0.0,
        start_error: str | None = None,
        poison_token: int | None = None,
        num_steps: float = math.inf,
    ) -> None:
        """Prepares a worker that is not started yet.

        Args:
            config: limits; its own num_kv_blocks and max_model_len win over the arguments.
            num_blocks: blocks of the KV cache, the null block included.
            max_model_len: most tokens of a request.
            vocab_size: sampled tokens are below this.
            step_time_s: how long a step takes.
            start_error: makes start() fail with this reason, until it is set to None.
            poison_token: the worker dies of any step of a request that came with this token.
            num_steps: steps that it runs until resume().
        """
        self._config = config
        self._num_blocks = config.cache.num_kv_blocks or num_blocks
        self._max_model_len = config.checkpoint.max_model_len or max_model_len
        self._vocab_size = vocab_size
        self._step_time_s = step_time_s
        self.start_error = start_error
        self._poison_token = poison_token
        self._poisoned_rows: set[int] = set()
        self.batch_sizes: list[int] = []
        """Requests of each step that was received, in all."""
        self._worker: FakeWorker | None = None
        self._sent: deque[BatchDescriptor] = deque()
        self._death: WorkerDiedError | None = None
        self._num_steps_left = num_steps
        self._wake = asyncio.Event()
        self.num_starts = 0
        self.num_stacks_shown = 0
        self.profile_orders: list[ProfileStart] = []
        self.profile_error: ProfileReport | None = None
        """The answer to the start of a profile, in place of success."""
        self.orders = RankOrders(1, self._take_order)
        self.orders_taken: list[str] = []
        """Kinds of the orders, which are carried out at once."""
        self.order_errors: dict[str, str] = {}
        """Why orders of a kind are refused."""
        self.unanswered: set[str] = set()
        """Kinds of orders that are not answered."""

    @property
    def pid(self) -> int | None:
        """A process id while the worker lives; no such process exists."""
        return None if self._worker is None else 2**22 + self.num_starts

    async def start(self, on_progress: Callable[[str], None] | None = None) -> WorkerReady:
        """Starts a fresh worker, with an empty cache."""
        self.num_starts += 1
        if on_progress is not None:
            on_progress("loading weights")
        if self.start_error is not None:
            raise WorkerDiedError(self.start_error)
        self._worker = FakeWorker(
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=self._max_model_len,
            num_blocks=self._num_blocks,
            block_size=self._config.cache.block_size,
            vocab_size=self._vocab_size,
            pools=self._config.checkpoint.task != "generate",
        )
        self._sent.clear()
        self._death = None
        return WorkerReady(
            num_blocks=self._num_blocks,
            block_bytes=8 * self._config.cache.block_size,
            num_parameters=1,
            device_name="cpu",
            dtype="float32",
            ranks=[RankInfo(pid=self.pid, device="cpu", num_blocks=self._num_blocks)],
        )

    def send(self, descriptor: BatchDescriptor) -> None:
        """Queues a step, as serialized bytes."""
        self._sent.append(BatchDescriptor.FromString(descriptor.SerializeToString()))
        self._wake.set()

    def order_profile(
        self, order: ProfileStart | ProfileStop, answer: Callable[[Any], None]
    ) -> None:
        """Starts every profile at once, and ends it at a stop."""
        if isinstance(order, ProfileStart):
            self.profile_orders.append(order)
            answer(ProfileStarted() if self.profile_error is None else self.profile_error)
        else:
            report = ProfileReport(num_steps=3, num_bytes=10, end=ProfileEnd.PROFILE_END_STOPPED)
            answer(report)

    def _take_order(self, command: WorkerCommand) -> None:
        kind = command.WhichOneof("command")
        self.orders_taken.append(kind)
        if kind not in self.unanswered:
            error = self.order_errors.get(kind, "")
            answer = OrderAnswer(order_id=command.order_id, error=error, num_bytes=1)
            self.orders.take(0, answer)

    def _swallow(self, descriptor: BatchDescriptor) -> None:
        """Dies if the step has a request that came with the poison."""
        self.batch_sizes.append(descriptor.context.batch_size)
        for assignment in descriptor.row_assignments:
            is_poisoned = self._poison_token in read_int32(assignment.token_ids)
            (self._poisoned_rows.add if is_poisoned else self._poisoned_rows.discard)(
                assignment.row
            )
        if not self._poisoned_rows.isdisjoint(read_int32(descriptor.attn_metadata.row_ids)):
            self.die("a step was poisonous")

    async def receive(self) -> StepResult:
        """Runs the oldest step and returns its result; waits for one if there is none."""
        while self._death is None and (not self._num_steps_left or not self._sent):
            self._wake.clear()
            await self._wake.wait()
        if self._death is None:
            self._num_steps_left -= 1
            await asyncio.sleep(self._step_time_s)
        if self._sent:
            self._swallow(self._sent[0])
        if self._death is not None:
            raise self._death
        assert self._worker is not None
        return self._worker.execute(self._sent.popleft())

    async def show_stacks(self) -> None:
        """Counts how often it was asked."""
        self.num_stacks_shown += 1

    async def stop(self) -> None:
        """Ends the worker."""
        self._worker = None
        self.die("the worker was stopped")
        self.orders.fail()

    def die(self, reason: str = "the worker died", *, was_killed: bool = False) -> None:
        """Makes every receive() fail from now on, until the next start."""
        self._death = (WorkerKilledError if was_killed else WorkerDiedError)(reason)
        self._wake.set()

    def hang(self) -> None:
        """Makes receive() wait for ever, or until resume()."""
        self._num_steps_left = 0

    def resume(self, num_steps: float = math.inf) -> None:
        """Ends hang() for this many steps."""
        self._num_steps_left = num_steps
        self._wake.set()
