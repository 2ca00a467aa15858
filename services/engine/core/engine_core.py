"""EngineCore takes requests, runs them on a worker, and ends each exactly once."""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import structlog

from protos.engine.v1.worker_pb2 import WorkerReady
from services.engine.capture_sizes.coverage import GraphCoverage
from services.engine.config.engine_config import EngineConfig
from services.engine.core.adapters import Adapters
from services.engine.core.drain import Drain
from services.engine.core.engine_scheduler import make_block_events, make_step_loop
from services.engine.core.expert_balance import ExpertBalance, ExpertFigures
from services.engine.core.graph_ledger import GraphLedger
from services.engine.core.live_requests import LiveRequests
from services.engine.core.profiles import Profiles
from services.engine.core.recent_work import RecentWork
from services.engine.core.request_ends import RequestEnds
from services.engine.core.saved_history import SavedHistory
from services.engine.core.sleep import Sleep
from services.engine.core.stats import Counters, EngineLoad, EngineStats
from services.engine.core.step_loop import StepLoop
from services.engine.core.survivors import Survivors
from services.engine.core.watchers import StepWatcher, StepWatchers
from services.engine.core.weights import Weights
from services.engine.core.worker_supervisor import Executor, WorkerSupervisor
from services.engine.errors import (
    DeadlineExpiredError,
    EngineError,
    EngineUnavailableError,
)
from services.engine.grammar.token_rules import with_token_rules
from services.engine.kv_cache.prefix_journal import PrefixChanges, PrefixCursor
from services.engine.limits import StepLimits
from services.engine.request import FinishReason, Request
from services.engine.worker.rank_process import WorkerDiedError, WorkerKilledError

if TYPE_CHECKING:
    from services.telemetry.spans import Tracing

log = structlog.get_logger()


class EngineCore:
    """The engine below the RPCs. All methods run in one event loop.

    `run` supervises a worker; `submit` takes requests while one is ready. A request's output goes
    to its sink; the last output has a finish reason or an error. Requests of a lost worker wait for
    the next one and continue after their known tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        limits: StepLimits,
        make_executor: Callable[[], Executor],
        on_readiness: Callable[[bool], None],
        tracing: "Tracing | None" = None,
    ) -> None:
        """Prepares an engine that is not ready yet.

        Args:
            config: settings of the queue, the cache and time.
            limits: of steps and sequences.
            make_executor: makes the executor of the next worker.
            on_readiness: called when the engine starts or stops taking requests.
            tracing: takes the spans of requests.
        """
        self.engine_id = uuid.uuid4().hex
        self.counters = Counters()
        self._started_s = time.monotonic()
        self._recent_work = RecentWork(self.counters.scheduler, self._started_s)
        self.watchers = StepWatchers()
        self.profiles = Profiles(config.observability, self.engine_id)
        self.block_events = make_block_events(config, limits)
        """Each rank's record of its cached blocks; none without --kv-events."""
        self.worker: WorkerReady | None = None
        """The last report of a worker that became ready; None before the first."""
        self._config = config
        self._limits = limits
        self._on_readiness = on_readiness
        self._steps: StepLoop | None = None
        self._experts: ExpertBalance | None = None
        self._graphs = GraphLedger(WorkerReady())
        self.history = SavedHistory(config, lambda: self._graphs)
        self._coverage = GraphCoverage.of((), limits)
        self.requests = LiveRequests(RequestEnds(self.counters, tracing), self._expire)
        """The live requests, and recent ones."""
        self._survivors = Survivors(
            self.requests, time_limit_s=config.worker.worker_patience_s, end=self.abort
        )
        self.adapters = Adapters(
            config.adapters,
            model=config.checkpoint.model_name,
            live=self.requests.all,
            end=self.abort,
        )
        self.weights = Weights(
            config,
            live=self.requests.all,
            events=self.block_events,
            check_awake=lambda: self.sleep.check_awake(),
        )
        make_executor = self.weights.prepared(make_executor)
        self._is_open = False
        self.drain = Drain(self.requests, abort_all=self._abort_drained)
        self.drain.listeners.add(lambda: on_readiness(False))
        self.sleep = Sleep(
            config.worker,
            self.requests,
            abort_all=self._abort_all,
            is_updating=lambda: self.weights.is_updating,
            on_change=lambda: on_readiness(self.is_ready),
        )
        self._supervisor = WorkerSupervisor(
            make_executor=make_executor,
            serve=self._serve,
            counters=self.counters,
            wait_until_wanted=self.sleep.wait_until_wanted,
        )

    @property
    def is_ready(self) -> bool:
        """Whether the engine takes new requests."""
        return self._is_open and self.sleep.is_awake and not self.drain.has_begun

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV caches of all ranks that have one of their own, and one null block."""
        if self.worker is None:
            return 0
        return self._limits.data_parallel_size * (self.worker.num_blocks - 1) + 1

    async def run(self) -> NoReturn:
        """Serves until it is cancelled.

        Raises:
            WorkerDiedError: the first worker could not start.
        """
        saving = asyncio.create_task(self.history.save_regularly())
        try:
            if not self.sleep.is_awake:
                await self.adapters.announce()
            await self._supervisor.run()
        except WorkerDiedError as error:
            self.sleep.fail(str(error))
            raise
        finally:
            saving.cancel()
            self.watchers.close()
            self._abort_all(EngineUnavailableError("the engine stopped"))
            self.history.save()
            self.weights.folder.close()

    def check_ready(self) -> None:
        """Raises EngineUnavailableError unless `is_ready`."""
        if self.drain.has_begun:
            raise EngineUnavailableError("the engine is draining and takes no new requests")
        self.sleep.check_awake()
        if not self._is_open:
            raise EngineUnavailableError("the engine is not ready: its worker is starting")

    def submit(self, request: Request) -> None:
        """Takes a request, whose output goes to its sink from now on; releases it on an error.

        Raises:
            EngineUnavailableError: the engine takes no requests now.
            DeadlineExpiredError: its deadline has passed.
            DuplicateRequestError: a live request has the same id.
            QueueFullError: too many requests wait.
            InvalidRequestError: it can never fit.
            RequestFaultError: the same request caused the loss of a worker.
        """
        try:
            self._take(request)
        except BaseException:
            request.release()
            raise

    def abort(self, request: Request, error: EngineError | None = None) -> None:
        """Ends a live request at once and frees its blocks.

        Its sink takes a last output with `error`, or with the finish reason ABORTED.
        """
        self._end(request, FinishReason.ABORTED if error is None else None, error)

    def watch(self, *, include_token_ids: bool, include_snapshot: bool) -> StepWatcher:
        """Returns a watcher of the steps from now on; raises errors as `StepWatchers.open` does."""
        return self.watchers.open(
            None if self._steps is None else self._steps.snapshot,
            num_ranks=self._limits.data_parallel_size,
            include_token_ids=include_token_ids,
            include_snapshot=include_snapshot,
        )

    def load(self) -> EngineLoad:
        """Returns the engine's present load."""
        if self._steps is None or self.worker is None:
            return EngineLoad()
        num_recent_tokens = self._recent_work.read(time.monotonic())
        age_s = self._steps.step_age_s
        return EngineLoad.of(self._steps.scheduler, self.num_blocks, age_s, num_recent_tokens)

    @property
    def resident_adapters(self) -> frozenset[bytes]:
        """Digests of the adapters in slots of the device."""
        return frozenset(() if self._steps is None else self._steps.scheduler.adapter_slots)

    def prefix_changes(self, cursor: PrefixCursor | None, *, max_keys: int) -> PrefixChanges:
        """Returns the prefixes added and removed after a cursor; None starts over."""
        if self._steps is None:
            return PrefixChanges(is_reset=True, cursor=None)
        return self._steps.scheduler.prefix_changes(cursor, max_keys=max_keys)

    def stats(self) -> EngineStats:
        """Returns the engine's counts since its start, and its state."""
        scheduler = None if self._steps is None else self._steps.scheduler
        return EngineStats(
            uptime_s=time.monotonic() - self._started_s,
            load=self.load(),
            num_blocks=self.num_blocks,
            num_cached_blocks=0 if scheduler is None else scheduler.num_cached_blocks,
            num_state_blocks=self._limits.num_state_blocks,
            num_snapshots=0 if scheduler is None else scheduler.num_snapshots,
            tiers=() if scheduler is None else scheduler.tiers,
            worker=self.worker or WorkerReady(),
            num_speculative_tokens=self._limits.num_speculative_tokens,
            num_batched_tokens_limit=0 if scheduler is None else scheduler.num_batched_tokens_limit,
            is_ready=self.is_ready,
            graphs=self._graphs,
            coverage=self._coverage,
            counters=self.counters,
            ranks=() if self.worker is None else tuple(self.worker.ranks),
            rank_loads=tuple(scheduler.rank_loads()) if scheduler is not None else (),
            worker_progress=self._supervisor.progress,
            adapters=self.adapters.figures(self.resident_adapters),
            sleep_state=self.sleep.state.value,
            sleep_level=self.sleep.level,
        )

    async def expert_figures(self) -> list[ExpertFigures]:
        """Returns the load of each layer's experts; nothing asleep or where no rank holds whole."""
        if self._experts is None or not self.sleep.is_awake:
            return []
        return await self._experts.figures()

    async def _serve(self, executor: Executor, ready: WorkerReady) -> NoReturn:
        """Serves requests with one worker until it is lost."""
        config = self._config
        self.worker = ready
        chosen = {name: getattr(ready, name) for name in ("state_pages", "shared_prefix_tokens")}
        self._limits = replace(self._limits, **chosen)
        allows_padding = config.compilation.cudagraph_padding
        self._graphs = GraphLedger(ready, allows_padding=allows_padding)
        self._coverage = GraphCoverage.of(
            ready.planned_graphs, self._limits, allows_padding=allows_padding
        )
        if ready.planned_graphs:
            self._coverage.report(self.history.steps)
        if ready.HasField("experts"):
            interval = config.parallel.eplb_interval
            self._experts = ExpertBalance(
                ready.experts, executor, interval=interval, counters=self.counters
            )
        self._steps = make_step_loop(
            config,
            self._limits,
            ready,
            dispatcher=self._graphs.dispatcher,
            events=self.block_events,
            channel=executor,
            step_timeout_s=config.worker.step_limit_s(on_cpu=ready.device_name == "cpu"),
            publish=self.requests.publish,
            counters=self.counters,
            graphs=self._graphs,
            history=self.history.steps,
            watchers=self.watchers,
        )
        self._steps.experts = self._experts
        self.profiles.use_worker(executor.order_profile)
        num_steps = self.counters.num_steps
        was_killed = False
        try:
            steps = self._steps
            self.weights.use_worker(executor, steps)
            await self.adapters.serve(executor, steps.run(), lambda: self._open(steps))
        except WorkerKilledError:
            was_killed = True
            raise
        finally:
            in_flight = self._steps.requests_in_flight
            self._steps = self._experts = None
            self._is_open = False
            self.adapters.lose_worker()
            self.sleep.lose_worker()
            self.weights.lose_worker()
            self.profiles.lose_worker()
            self._on_readiness(False)
            self.watchers.close_with_snapshot()
            for events in self.block_events:
                events.clear()
            self._survivors.take(
                in_flight,
                was_killed=was_killed,
                has_progressed=self.counters.num_steps > num_steps,
            )

    def _open(self, steps: StepLoop) -> None:
        """Takes requests from now on."""
        self._survivors.hand_over(steps)
        self._is_open = True
        self.sleep.use_worker(steps)
        self._on_readiness(self.is_ready)

    def _take(self, request: Request) -> None:
        self.check_ready()
        assert self._steps is not None, "check_ready saw a step loop"
        if request.deadline_s is not None and request.deadline_s <= time.monotonic():
            raise DeadlineExpiredError("the request's time limit had passed when it arrived")
        self.requests.check_is_new(request.request_id)
        self._survivors.check(request)
        self.weights.mark(request)
        request.constraint = with_token_rules(
            request.sampling,
            request.constraint,
            request.resumed_token_ids,
            vocab_size=self._limits.vocab_size,
        )
        self._steps.scheduler.add(request)
        self.requests.add(request)
        if request.constraint is not None:
            request.constraint.listen(self._wake, partial(self._complete, request))
        self._steps.wake()

    def _wake(self) -> None:
        if self._steps is not None:
            self._steps.wake()

    def _complete(self, request: Request, error: EngineError | None) -> None:
        self._end(request, FinishReason.STOP if error is None else None, error)

    def _end(
        self, request: Request, reason: FinishReason | None, error: EngineError | None
    ) -> None:
        if request not in self.requests:
            return
        # A new worker's scheduler has the live requests once it is open.
        if self._steps is not None and self._is_open:
            self._steps.scheduler.abort(request)
            self._steps.wake()
        self.requests.end(request, reason, error)

    def _abort_drained(self) -> None:
        self._abort_all(EngineUnavailableError("the engine drained and its time limit passed"))

    def _abort_all(self, error: EngineError) -> None:
        for request in self.requests.all():
            self.abort(request, error)

    def _expire(self, request: Request) -> None:
        self.abort(
            request, DeadlineExpiredError("the request's time limit passed before it was finished")
        )
