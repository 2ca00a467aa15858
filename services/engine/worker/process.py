"""The life of a worker process: start, announce, run steps until the service hangs up."""

import gc
import time
import traceback
from collections import deque
from collections.abc import Iterable
from typing import NoReturn, Protocol

import structlog

from models.parallel.collectives import LostPeerError, check_arrivals, num_issued
from protos.engine.v1.worker_pb2 import (
    GraphOrder,
    OrderAnswer,
    ProfileStarted,
    Recompilation,
    WorkerCommand,
    WorkerEvent,
    WorkerFailure,
    WorkerReady,
)
from services.engine.batch import BatchDescriptor, StepFailure
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.config.engine_config import EngineConfig
from services.engine.patch_memory import PatchMemory
from services.engine.worker.graphs.background_capture import BackgroundCapture
from services.engine.worker.meeting import Meeting
from services.engine.worker.out_of_memory import is_out_of_memory, release_memory
from services.engine.worker.pending_steps import FailedStep, Pending
from services.engine.worker.placement import RankPlace, reporting_ranks
from services.engine.worker.recompilations import Recompilations
from services.engine.worker.runner.adapter_store import AdapterStore
from services.engine.worker.runner.expert_placer import ExpertPlacer
from services.engine.worker.runner.step_profiler import StepProfiler
from services.engine.worker.runner.weight_store import WeightStore
from services.engine.worker.sleep.sleeper import Sleeper
from services.engine.worker.start.startup import start_worker
from services.engine.worker.wire import Channel
from services.engine.worker.worker_events import WorkerEvents

log = structlog.get_logger()

READING_POLL_S = 0.01
"""Pause between looks at adapters and weights that are being read."""
POLL_S = 50e-6
"""Pause between looks at a result that the device has not finished, and at the socket."""


def run_worker(
    config: EngineConfig,
    channel: Channel,
    *,
    place: RankPlace,
    meeting: Meeting,
    patches: PatchMemory | None = None,
) -> int:
    """Serves steps until the other side hangs up.

    Args:
        config: the engine's configuration.
        channel: the connection to the engine service.
        place: this rank's.
        meeting: where it finds the other ranks.
        patches: memory of the service that steps name, if there is some.

    Returns:
        The exit code: 0 after a hang-up, 1 after a failure, which was reported to the service.
    """
    server = StepServer(
        channel,
        fail_on_late_build=config.compilation.fail_on_late_build,
        sends_results=place.rank in reporting_ranks(config.parallel),
        num_ranks=config.parallel.num_ranks,
    )
    try:
        try:
            started = start_worker(
                config,
                place=place,
                meeting=meeting,
                report_progress=server.events.report_progress,
                on_fault=server.report_fault,
                on_compiled=server.events.report_compiled,
                report_disk=server.events.report_disk,
            )
        except ValueError as error:  # the operator can mend it; where it was raised does not help
            log.debug("worker_refused_to_start", exc_info=error)
            server.events.report_failure(WorkerFailure(error=str(error)))
            return 1
        # torch and the model stay for good; a full collection walks them for 70 ms in mid-step.
        gc.freeze()
        server.weights = started.weights
        if started.runner.encoder is not None:
            started.runner.encoder.memory = patches
        if started.capture is not None:
            started.weights.on_swap = started.capture.begin_again
        sleeper = None if started.memory is None else Sleeper(started.memory)
        server.serve(started.runner, started.ready, started.capture, sleeper)
    except EOFError:
        log.info("worker_stopped")
        return 0
    except LostPeerError as error:
        log.warning("rank_was_lost", step_id=server.step_id, error=str(error))
        failure = WorkerFailure(error=str(error), step_id=server.step_id, has_lost_peer=True)
        server.events.report_failure(failure)
        return 1
    except Exception as error:  # the worker's engine loop: whatever it was ends the worker
        log.exception("worker_failed", step_id=server.step_id)
        details = "".join(traceback.format_exception(error))
        text = f"{type(error).__name__}: {error}\n{details}"
        server.events.report_failure(WorkerFailure(error=text, step_id=server.step_id))
        return 1


class RecompilationError(Exception):
    """Code was compiled after warm-up, and fail_on_late_build is set."""


class RankFaultError(Exception):
    """This rank cannot do what the others do."""


class Runner(Protocol):
    """Runs the steps; ModelRunner."""

    @property
    def experts(self) -> ExpertPlacer:
        """The experts of the model, if ranks hold whole ones."""

    @property
    def adapters(self) -> AdapterStore | None:
        """Reads and loads adapters, of a model with room for some."""

    def execute(self, descriptor: BatchDescriptor) -> Pending:
        """Runs one step, or queues it on the device."""


class StepServer:
    """The loop between the channel and the runner."""

    def __init__(
        self,
        channel: Channel,
        *,
        fail_on_late_build: bool = False,
        sends_results: bool = True,
        num_ranks: int = 1,
    ) -> None:
        """Starts without a runner.

        Args:
            channel: the connection to the engine service.
            fail_on_late_build: whether code that is compiled while serving is an error.
            sends_results: whether it does; of ranks that share every layer one does.
            num_ranks: processes that share the model.
        """
        self._channel = channel
        self.events = WorkerEvents(channel)
        """Events of this worker for the service."""
        self._sends_results = sends_results
        self._has_others = num_ranks > 1
        self._waits_for_order = False
        self._sleep_order: WorkerCommand | None = None
        self._fail_on_late_build = fail_on_late_build
        self._recompilations = Recompilations()
        self._profiler = StepProfiler()
        self._pending: deque[Pending] = deque()
        self._num_failed_steps = 0
        self._last_result_ns = 0
        self.step_id = 0
        """The step read last; 0 before the first."""
        self.weights: WeightStore | None = None
        """Checks other weights, and loads them into the model."""

    def serve(
        self,
        runner: Runner,
        ready: WorkerReady,
        capture: BackgroundCapture | None = None,
        sleeper: Sleeper | None = None,
    ) -> NoReturn:
        """Announces the worker and runs steps.

        A descriptor that has arrived is launched before any result is waited for, and a result
        that is ready is sent without waiting for a descriptor. Between steps graphs are captured,
        except while the worker sleeps.

        Raises:
            EOFError: the service hung up.
        """
        self._recompilations.load()
        self.events.send(WorkerEvent(ready=ready))
        while True:
            if not self._recompilations.is_armed and (capture is None or not capture.has_work):
                self._recompilations.arm()
            # Before the wait for a command: the end of a compilation is none.
            if self._sleep_order is not None and (capture is None or not capture.is_compiling):
                self._sleep(self._sleep_order, runner, capture, sleeper)
            content = self._channel.receive(self._max_wait_s(capture, runner.adapters))
            if content is not None:
                self._obey(WorkerCommand.FromString(content), runner, capture)
            self._send_news(runner)
            while self._pending and self._pending[0].is_ready:
                self._send_result(self._pending.popleft())
            is_idle = content is None and not self._pending
            if capture is not None:
                self._go_on_capturing(capture, is_idle=is_idle)

    def _sleep(
        self,
        order: WorkerCommand,
        runner: Runner,
        capture: BackgroundCapture | None,
        sleeper: Sleeper | None,
    ) -> None:
        """Sleeps until an order wakes the worker; it may be awake, if another rank cannot sleep.

        A compilation, which reads weights, has ended.
        """
        assert sleeper is not None, "the service knows whether its workers can sleep"
        self._sleep_order = None

        def receive() -> WorkerCommand | None:
            self._send_news(runner)
            content = self._channel.receive(self._max_wait_s(None, runner.adapters))
            return None if content is None else WorkerCommand.FromString(content)

        sleeper.sleep(
            order,
            receive=receive,
            obey=lambda command: self._obey(command, runner, capture),
            answer=lambda answer: self.events.send(WorkerEvent(order_answer=answer)),
        )

    def _send_news(self, runner: Runner) -> None:
        """Sends what became ready beside steps."""
        self.events.report_profile(self._profiler.poll())
        if runner.adapters is not None:
            for answer in runner.adapters.finished():
                self.events.send(WorkerEvent(adapter_read=answer))
        self._answer(() if self.weights is None else self.weights.finished())

    def _go_on_capturing(self, capture: BackgroundCapture, *, is_idle: bool) -> None:
        """Captures what is due. Of several ranks each waits for the order: captures communicate."""
        if self._waits_for_order or not capture.is_due(is_idle=is_idle):
            return
        order = capture.due(is_idle=is_idle)
        if order is None:
            return
        if self._has_others:
            self._waits_for_order = True
            self.events.send(WorkerEvent(capture_due=order))
            return
        self._capture_as_told(capture, order)

    def _capture_as_told(self, capture: BackgroundCapture, order: GraphOrder) -> None:
        self._waits_for_order = False
        outcome = capture.obey(order)
        if outcome is not None:
            self.events.report_graph(outcome)

    def _send_result(self, pending: Pending) -> None:
        """Sends a step's result. Ranks that send none send failures.

        Raises:
            LostPeerError: another rank left out its part of the step.
        """
        check_arrivals()
        if self._sends_results or isinstance(pending, FailedStep):
            result, now_ns = pending.message(), time.perf_counter_ns()
            # A step may be queued while the one before it runs, whose time is not its own.
            result.elapsed_us = min(result.elapsed_us, (now_ns - self._last_result_ns) // 1000)
            self._last_result_ns = now_ns
            self.events.send(WorkerEvent(result=result))

    def _obey(
        self, command: WorkerCommand, runner: Runner, capture: BackgroundCapture | None
    ) -> None:
        """Queues a step, captures a graph, moves experts, reads adapters, or profiles steps."""
        kind = command.WhichOneof("command")
        if kind == "start_profile":
            report = self._profiler.start(command.start_profile)
            if report is None:
                self.events.send(WorkerEvent(profile_started=ProfileStarted()))
            self.events.report_profile(report)
        elif kind == "stop_profile":
            self._profiler.stop()
        elif kind == "place_experts":
            runner.experts.place(command.place_experts)
        elif kind == "read_expert_load":
            self.events.send(WorkerEvent(expert_load=runner.experts.load()))
        elif kind in ("read_adapter", "forget_adapter"):
            assert runner.adapters is not None, "the service knows whether there is room"
            runner.adapters.obey(command)
        elif kind in ("check_weights", "swap_weights", "drop_weights"):
            assert self.weights is not None, "a worker that serves has a model"
            self._answer(self.weights.obey(command))
        elif kind == "capture":
            assert capture is not None, "a capture is ordered when it is due"
            self._capture_as_told(capture, command.capture)
        elif kind in ("sleep", "wake"):
            self._sleep_order = command
        else:
            descriptor = BatchDescriptor.FromString(command.step)
            self.step_id = descriptor.step_id
            with self._profiler.step(descriptor):
                self._pending.append(self._execute(runner, descriptor))
            self._report_recompilations()

    def _answer(self, answers: Iterable[OrderAnswer]) -> None:
        for answer in answers:
            self.events.send(WorkerEvent(order_answer=answer))

    def _execute(self, runner: Runner, descriptor: BatchDescriptor) -> Pending:
        """Runs a step, unless memory does not suffice or the step builds on one that was not run.

        Once the service knows of a failure it assigns every row again, so whatever the steps before
        that left undone is made good.
        """
        if descriptor.num_failed_steps < self._num_failed_steps:
            return FailedStep(descriptor.step_id, StepFailure.STEP_FAILURE_SKIPPED)
        try:
            return runner.execute(descriptor)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("step_ran_out_of_memory", step_id=descriptor.step_id, error=str(error))
        release_memory()
        self._num_failed_steps += 1
        failure = StepFailure.STEP_FAILURE_OUT_OF_MEMORY
        return FailedStep(descriptor.step_id, failure, num_issued())

    def report_fault(self, outcome: GraphOutcome) -> None:
        """Reports a graph that was given up while serving.

        Raises:
            RankFaultError: other ranks have replayed it already, and wait for this one.
        """
        self.events.report_graph(outcome)
        if self._has_others:
            raise RankFaultError(f"a graph cannot be replayed on one rank: {outcome.fault}")

    def _report_recompilations(self) -> None:
        """Reports recompilations during the last step to the service.

        Raises:
            RecompilationError: there was one, and the flag makes it an error.
        """
        for name in self._recompilations.drain():
            log.warning("late_build_happened", step_id=self.step_id, name=name)
            self.events.send(WorkerEvent(recompilation=Recompilation(name=name)))
            if self._fail_on_late_build:
                raise RecompilationError(f"{name} was compiled in the middle of serving")

    def _max_wait_s(
        self, capture: BackgroundCapture | None, adapters: AdapterStore | None
    ) -> float | None:
        """Returns how long to wait for a descriptor; None while there is nothing else to do."""
        if self._pending:
            return POLL_S
        if self._waits_for_order:
            capture = None
        is_reading = adapters is not None and adapters.is_reading
        waits = (
            self._profiler.max_wait_s,
            None if capture is None else capture.max_wait_s,
            READING_POLL_S if is_reading else None,
            READING_POLL_S if self.weights is not None and self.weights.is_checking else None,
        )
        return min((wait for wait in waits if wait is not None), default=None)
