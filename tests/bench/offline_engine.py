"""An engine without its service: EngineCore in this process, the real worker in its own."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from models.config_sections.vision import VisionConfig
from protos.engine.v1.worker_pb2 import WorkerReady
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.core.graph_ledger import GraphFigures
from services.engine.errors import EngineError
from services.engine.limits import StepLimits
from services.engine.patch_memory import PatchMemory
from services.engine.request import OutputSink, Request, RequestOutput, SamplingParams
from services.engine.server import collect_garbage_rarely
from services.engine.worker.executor import WorkerExecutor
from tests.bench.workload import Job

PATCH_BYTES = 2**32
"""Room for a thousand images of a megapixel; only what is written takes memory."""


class EngineFailedError(Exception):
    """The engine lost its worker or refused a request; the message says why."""


@dataclass
class StartTimes:
    """When a worker reached which stage of its start; seconds of time.perf_counter()."""

    started_s: float = 0.0
    stages: list[tuple[str, float]] = field(default_factory=list)
    ready_s: float = 0.0
    capture_s: float = 0.0

    def note(self, stage: str) -> None:
        """Takes a stage that begins now."""
        self.stages.append((stage, time.perf_counter()))

    def parts(self) -> dict[str, float]:
        """Returns the seconds to ready, split; `rest` is memory and whatever else there is."""
        total = self.ready_s - self.started_s
        first_s = self.stages[0][1] if self.stages else self.ready_s
        parts = {
            "import": first_s - self.started_s,
            "load": self._duration("load"),
            "kernels": self._duration("kernels"),
            "compile": self._duration("compil"),
            "capture": self.capture_s,
        }
        return {"ready": total, **parts, "rest": max(0.0, total - sum(parts.values()))}

    def _duration(self, word: str) -> float:
        """Returns the time from the first stage with a word in it to the first without."""
        begin_s = None
        for stage, at_s in self.stages:
            if begin_s is None and word in stage:
                begin_s = at_s
            elif begin_s is not None and word not in stage:
                return at_s - begin_s
        return 0.0 if begin_s is None else self.ready_s - begin_s


class TimedExecutor(WorkerExecutor):
    """A worker whose start is timed."""

    def __init__(
        self, config: EngineConfig, times: StartTimes, patches: PatchMemory | None = None
    ) -> None:
        super().__init__(config, patches=patches)
        self._times = times

    async def start(self, on_progress: Callable[[str], None] | None = None) -> WorkerReady:
        """Starts the worker and waits until it takes steps."""
        del on_progress
        self._times.started_s = time.perf_counter()
        ready = await super().start(self._times.note)
        self._times.ready_s = time.perf_counter()
        self._times.capture_s = sum(report.capture_s for report in ready.graphs)
        return ready


class _Sink(OutputSink):
    """Counts the requests that are left, and makes room for the next where one ends."""

    def __init__(self, num_left: int, places: asyncio.Semaphore) -> None:
        self.num_left = num_left
        self._places = places
        self.ended_s = 0.0
        self.error = ""
        self.done = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if output.is_last:
            self.num_left -= 1
            self._places.release()
            self.ended_s = time.perf_counter()
            if output.error is not None:
                self.error = str(output.error)

    def flush(self) -> None:
        if self.num_left == 0:
            self.done.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Outcome of requests that were submitted at once.

    num_ended: fewer than all if time ran out. elapsed_s: until the last of them ended.
    """

    elapsed_s: float
    num_ended: int
    outputs: list[list[int]]
    ttft_s: list[float]
    """From submission to first token, per request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphUse:
    """Counts of steps since the engine started."""

    dispatch: dict[str, int]
    num_steps: int
    graph_tokens: int
    padded_tokens: int
    num_preemptions: int
    busy_us: int
    """Time of all steps in the worker."""

    def since(self, earlier: "GraphUse") -> dict[str, object]:
        """Returns what happened since an earlier count; shares are None where nothing ran."""
        dispatch = Counter(self.dispatch)
        dispatch.subtract(earlier.dispatch)
        num_steps = self.num_steps - earlier.num_steps
        graph_tokens = self.graph_tokens - earlier.graph_tokens
        padded = self.padded_tokens - earlier.padded_tokens
        return {
            "num_steps": num_steps,
            "hit_rate": dispatch["graph"] / num_steps if num_steps else None,
            "padding": padded / graph_tokens if graph_tokens else None,
            "dispatch": {reason: count for reason, count in dispatch.items() if count},
            "num_preemptions": self.num_preemptions - earlier.num_preemptions,
            "busy_s": (self.busy_us - earlier.busy_us) / 1e6,
        }


class OfflineEngine:
    """Takes token ids and returns token ids."""

    def __init__(
        self,
        core: EngineCore,
        config: EngineConfig,
        times: StartTimes,
        vision: VisionConfig | None,
    ) -> None:
        self.core = core
        self.vision = vision
        self.config = config
        self.times = times
        self.executor: TimedExecutor | None = None
        self.patches: PatchMemory | None = None
        """Where the worker reads patches of images."""
        self._num_requests = 0

    async def generate(
        self, jobs: Sequence[Job], *, limit_s: float | None = None, at_once: int | None = None
    ) -> Generated:
        """Submits jobs, greedy and to their full length, and waits for the last.

        limit_s: seconds after which running requests are aborted; None for no limit.
        at_once: jobs that are there at a time, others when one ends; None for all.

        Raises:
            EngineFailedError: one of them failed or was refused.
        """
        places = asyncio.Semaphore(at_once or len(jobs))
        sink = _Sink(len(jobs), places)
        requests = [self.request(job, sink) for job in jobs]
        submitted: list[Request] = []
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(limit_s):
                for request in requests:
                    await places.acquire()
                    request.arrival_s = time.monotonic()
                    self.core.submit(request)
                    submitted.append(request)
                await sink.done.wait()
        except EngineError as error:
            raise EngineFailedError(f"the engine refused a request: {error}") from error
        except TimeoutError:
            pass
        elapsed_s, num_ended = sink.ended_s - started_s, len(jobs) - sink.num_left
        if num_ended < len(jobs):
            for request in submitted:
                self.core.abort(request)
        if sink.error:
            raise EngineFailedError(sink.error)
        return Generated(
            elapsed_s=elapsed_s,
            num_ended=num_ended,
            outputs=[request.token_ids[request.num_prompt_tokens :] for request in requests],
            ttft_s=[
                each.first_token.at_s - each.arrival_s for each in requests if each.first_token
            ],
        )

    async def wait_until_captured(self) -> None:
        """Returns when no planned graph is left to capture."""
        while len(self.graph_figures()) < self.core.stats().graphs.num_planned:  # noqa: ASYNC110  an engine reports no captures
            await asyncio.sleep(0.02)

    def graph_facts(self) -> dict[str, object]:
        """Returns what the graphs are and cost."""
        ledger, figures = self.core.stats().graphs, self.graph_figures()
        return {
            "mode": ledger.mode,
            "num_planned": ledger.num_planned,
            "num_captured": sum(not figure.fault for figure in figures),
            "faults": sorted({figure.fault for figure in figures if figure.fault}),
            "capture_s": round(sum(figure.capture_s for figure in figures), 3),
            "bytes": sum(figure.num_bytes for figure in figures),
            "late_builds": self.core.counters.num_late_builds,
        }

    def graph_figures(self) -> list[GraphFigures]:
        """Returns every graph that was captured or given up so far."""
        return self.core.stats().graphs.figures

    def graph_use(self) -> GraphUse:
        """Returns the counts of now."""
        stats = self.core.stats()
        figures = [each for each in self.graph_figures() if not each.is_encoder]
        return GraphUse(
            dispatch=stats.counters.steps_by_dispatch(),
            num_steps=stats.counters.num_steps,
            graph_tokens=sum(each.num_replays * each.key.num_tokens for each in figures),
            padded_tokens=sum(each.padded_tokens for each in figures),
            num_preemptions=stats.counters.scheduler.num_preemptions,
            busy_us=stats.counters.worker_busy_us,
        )

    @property
    def num_verifications(self) -> int:
        """Requests whose drafts were verified so far, counted once for each step; 0 without any."""
        return self.core.counters.drafts.num_verifications

    @property
    def acceptance(self) -> float:
        """Drafts that held, of each request in a step on average."""
        return round(self.core.counters.drafts.num_accepted / self.num_verifications, 4)

    @property
    def worker(self) -> WorkerReady:
        """Returns the worker's report of its start."""
        assert self.core.worker is not None
        return self.core.worker

    @property
    def worker_pid(self) -> int:
        """The worker's process id."""
        assert self.executor is not None
        pid = self.executor.pid
        if pid is None:
            raise EngineFailedError("the worker is gone")
        return pid

    def request(self, job: Job, sink: OutputSink) -> Request:
        """Returns a request of a job, greedy and to its full length."""
        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=job.num_output)
        return Request(
            request_id=f"bench-{self._num_requests}",
            handle=self._num_requests,
            prompt_token_ids=job.prompt,
            images=job.images,
            sampling=sampling,
            sink=sink,
            arrival_s=0.0,
        )


@asynccontextmanager
async def offline_engine(config: EngineConfig) -> AsyncIterator[OfflineEngine]:
    """Starts an engine and ends its worker afterwards.

    Raises:
        WorkerDiedError: the worker could not start.
        ModelFolderError: the model cannot be served.
    """
    model = ModelFolder.open(
        config.checkpoint.model,
        name="bench",
        max_model_len=config.checkpoint.max_model_len,
        max_image_tokens=config.images.max_image_tokens,
        task=config.checkpoint.task,
    )
    times = StartTimes()
    is_ready = asyncio.Event()
    patches = None if model.config.vision is None else PatchMemory.create(PATCH_BYTES)

    def make_executor() -> TimedExecutor:
        engine.executor = TimedExecutor(config, times, patches)
        return engine.executor

    core = EngineCore(
        config,
        limits=StepLimits.of(
            config,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            cache_windows=model.config.entry_windows(
                with_draft_layers=config.speculation.num_layer_drafts > 0
            ),
            sees_images=model.config.vision is not None,
            max_whole_tokens=model.config.max_whole_tokens,
            computes_whole_prompts=model.config.sees_later,
            pooling=None if model.pooling is None else model.pooling.method,
        ),
        make_executor=make_executor,
        on_readiness=lambda ready: is_ready.set() if ready else is_ready.clear(),
    )
    engine = OfflineEngine(core, config, times, model.config.vision)
    engine.patches = patches
    collect_garbage_rarely()
    running = asyncio.create_task(core.run())
    waiting = asyncio.create_task(is_ready.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield engine
    finally:
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
