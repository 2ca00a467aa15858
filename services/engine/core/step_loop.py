"""The loop of one worker: schedule, send, take the result, publish."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import structlog

from protos.engine.v1 import worker_pb2 as pb
from services.engine.batch import StepFailure, StepResult, num_rows
from services.engine.capture_sizes.history import StepHistory
from services.engine.core.disk_reports import read_disk_report
from services.engine.core.expert_balance import ExpertBalance
from services.engine.core.graph_ledger import GraphLedger
from services.engine.core.snapshot import PendingSnapshot
from services.engine.core.stats import Counters
from services.engine.core.step_channel import StepChannel
from services.engine.core.step_pause import StepPause
from services.engine.core.watchers import StepWatchers
from services.engine.request import Request
from services.engine.scheduler.data_parallel import AnyScheduler
from services.engine.scheduler.scheduler import ScheduledStep
from services.engine.scheduler.step_outputs import StepOutputs

log = structlog.get_logger()

MAX_STEPS_IN_FLIGHT = 2
"""One step runs while the next waits at the worker, so the device never waits for the host.
With more pipeline stages there are as many."""


class WorkerHungError(Exception):
    """The worker has not answered a step within the time limit."""


class StepLoop:
    """Runs the steps of one scheduler on one worker until the worker is lost.

    It waits for a result only with as many steps in flight as it allows: step n+1 is sent before
    the result of step n is back. Other tasks run between two steps.
    """

    def __init__(
        self,
        *,
        scheduler: AnyScheduler,
        channel: StepChannel,
        step_timeout_s: float,
        publish: Callable[[StepOutputs], None],
        counters: Counters,
        graphs: GraphLedger,
        history: StepHistory,
        watchers: StepWatchers,
    ) -> None:
        self.scheduler = scheduler
        self._max_in_flight = max(MAX_STEPS_IN_FLIGHT, scheduler.num_stages)
        self._channel = channel
        self._step_timeout_s = step_timeout_s
        self._publish = publish
        self._counters = counters
        self._graphs = graphs
        self._history = history
        self._watchers = watchers
        self.experts: ExpertBalance | None = None
        """Moves whole experts between ranks, where they hold some."""
        self.pause = StepPause(channel, self.wake)
        """Keeps the loop from ordering steps."""
        self._in_flight: deque[ScheduledStep] = deque()
        self._results: deque[StepResult] = deque()
        self._wake = asyncio.Event()
        self._progress_s: float | None = None

    @property
    def step_age_s(self) -> float:
        """Seconds since a step last finished while work is pending; else 0."""
        if self._progress_s is None:
            return 0.0
        return time.monotonic() - self._progress_s

    @property
    def requests_in_flight(self) -> set[Request]:
        """The requests of the steps in flight."""
        return {
            request for step in self._in_flight for request in (*step.requests, *step.unsampled)
        }

    def wake(self) -> None:
        """Wakes the loop after the scheduler's requests changed."""
        self._wake.set()

    def snapshot(self) -> PendingSnapshot:
        """Returns the state before the next step to be scheduled."""
        return PendingSnapshot(
            self.scheduler.running,
            adapter_slot=self.scheduler.adapter_slot,
            slots=self.scheduler.adapter_slots,
            next_step_id=self.scheduler.next_step_id,
            num_in_flight=len(self._in_flight),
        )

    async def run(self) -> NoReturn:
        """Runs steps until the worker is lost.

        Raises:
            WorkerDiedError: the worker has exited.
            WorkerHungError: the worker does not answer.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_results())
                tasks.create_task(self._watch_age())
                await self._step_for_ever()
        except ExceptionGroup as group:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # A task group drops a cancellation that meets an error; the loop would go on.
                raise asyncio.CancelledError from None
            raise group.exceptions[0] from None
        finally:
            self.pause.fail()

    async def _step_for_ever(self) -> NoReturn:
        while True:
            if not self._results:
                self._fill()
            while self._results:
                result = self._results.popleft()
                outputs = self._update(result)
                # The worker gets its next step before the tokens of the last one are published.
                self._fill()
                self._counters.latencies.count_step(outputs)
                self._publish(outputs)
                del outputs  # this frame would keep ended requests alive until the next step
            # Requests that wait for a disk, which one rank alone has, have a time limit.
            limit_s = self.scheduler.tiers[0].wake_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), limit_s)
            self._wake.clear()

    def _update(self, result: StepResult) -> StepOutputs:
        step = self._in_flight.popleft()
        assert step.step_id == result.step_id, "results come in the order of the steps"
        self._progress_s = time.monotonic()
        if result.failure:
            return self._retreat(step, result)
        started_ns = time.perf_counter_ns()
        outputs = self.scheduler.update(step, result)
        counters = self._counters
        counters.schedule_ns += time.perf_counter_ns() - started_ns
        counters.num_steps += 1
        counters.worker_busy_us += result.elapsed_us
        self._count(step, result)
        if step.has_requests:
            context = step.descriptor.context
            counters.recent_steps.add(
                step.step_id,
                self._progress_s,
                num_tokens=context.num_tokens,
                batch_size=context.batch_size,
            )
        return outputs

    def _count(self, step: ScheduledStep, result: StepResult) -> None:
        """Counts a step by its size and its graph, and shows it to watchers."""
        self._watchers.publish(step, result)
        if not step.has_requests:
            return
        counters = self._counters
        counters.count(step.descriptor, result)
        counters.graph_dispatch[self._graphs.count(step.descriptor, result)] += 1
        context = step.descriptor.context
        counters.num_step_tokens += context.num_tokens
        self._history.count(num_tokens=context.num_tokens, batch_size=context.batch_size)

    def _retreat(self, step: ScheduledStep, result: StepResult) -> StepOutputs:
        """Takes back a step that was not computed, and all later ones."""
        if result.failure == StepFailure.STEP_FAILURE_SKIPPED:
            return StepOutputs()  # it was taken back together with the failed step
        self._counters.num_failed_steps += 1
        outputs = self.scheduler.retreat([step, *self._in_flight])
        log.warning(
            "step_ran_out_of_memory",
            step_id=step.step_id,
            num_tokens=num_rows(step.descriptor),
            num_batched_tokens_limit=self.scheduler.num_batched_tokens_limit,
            num_ended=len(outputs),
        )
        self._watchers.close_with_snapshot()
        return StepOutputs(others=outputs)

    def _fill(self) -> None:
        started_ns = time.perf_counter_ns()
        while len(self._in_flight) < self._max_in_flight and not self.pause.is_wanted:
            step = self.scheduler.schedule()
            if step is None:
                break
            if self.experts is not None:
                self.experts.begin_step()
            self._channel.send(step.descriptor, *(each.descriptor for each in step.others))
            self._in_flight.append(step)
        self._counters.schedule_ns += time.perf_counter_ns() - started_ns
        if not self._in_flight:
            self.pause.reach()
        if not self._in_flight and (self.pause.is_wanted or not self.scheduler.has_work):
            self._progress_s = None
        elif self._progress_s is None:
            self._progress_s = time.monotonic()

    async def _receive_results(self) -> NoReturn:
        while True:
            event = await self._channel.receive()
            if isinstance(event, pb.GraphReport):
                self._graphs.take(event)
            elif isinstance(event, pb.Recompilation):
                self._counters.num_late_builds += 1
            elif isinstance(event, pb.CompileReport):
                self._graphs.pass_matches = dict(event.pass_matches)
            elif isinstance(event, pb.DiskReport):
                self.scheduler.tiers[0].take_disk_news(read_disk_report(event))
                self._wake.set()
            elif isinstance(event, pb.ExpertLoad):
                if self.experts is not None:
                    self.experts.take(event)
            else:
                self._results.append(event)
                self._wake.set()

    async def _watch_age(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._step_timeout_s / 4)
            age_s = self.step_age_s
            if age_s > self._step_timeout_s:
                raise WorkerHungError(
                    f"no step finished for {age_s:.1f} s; the limit is {self._step_timeout_s} s"
                )
            if self.pause.is_late:
                raise WorkerHungError("an order was not carried out in time")
