"""An engine with a fake worker: the core alone, or the whole service on a loopback port."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from models.config import ModelConfig
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from services.engine.checkpoint.model_folder import DefaultSampling, ModelFolder
from services.engine.checkpoint.tokenizer_files import TokenizerFile, TokenizerFiles
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.limits import StepLimits
from services.engine.request import OutputSink, Request, RequestOutput, SamplingParams
from services.engine.server import EngineServer
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_worker import VOCAB_SIZE
from tests.support.waiting import until

MAX_MODEL_LEN = 256
SEED = 7


def engine_config(**changes: Any) -> EngineConfig:
    """Returns a small configuration on a free port, whatever the environment says."""
    values = {
        "histogram_dir": "",
        "port": 0,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_num_waiting": 8,
        "num_kv_blocks": 64,
        "max_model_len": MAX_MODEL_LEN,
        "heartbeat_interval_ms": 50,
        "grammar_timeout_s": 30.0,
        "slow_reader_timeout_s": 60.0,
    }
    return EngineConfig.from_flags(**{**values, **changes})


def step_limits(config: EngineConfig) -> StepLimits:
    """Returns the limits of an engine that serves `model_folder()`."""
    return StepLimits.of(
        config,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        cache_windows=(None,),
        pooling=None if config.checkpoint.task == "generate" else "last",
    )


def model_folder(**changes: Any) -> ModelFolder:
    """Returns a model whose vocabulary is the fake worker's and which never ends by itself."""
    values = {
        "name": "fake",
        "architecture": "FakeForCausalLM",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "eos_token_ids": frozenset(),
        "default_sampling": DefaultSampling(),
        "tokenizer": TokenizerFiles((TokenizerFile("tokenizer.json", b"{}"),), "0" * 64),
        "config_sha256": "0" * 64,
        "config": ModelConfig.from_folder(TINY_CHECKPOINT),
    }
    return ModelFolder(**{**values, **changes})


class RecordingSink(OutputSink):
    """Collects output, and lets a test wait for it."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.num_flushes = 0
        self._changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Takes one request's output of one step."""
        self.outputs.append(output)

    def flush(self) -> None:
        """Counts the end of a step."""
        self.num_flushes += 1
        self._changed.set()

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far."""
        return [token_id for output in self.outputs for token_id in output.token_ids]

    async def wait_for(self, condition: Callable[["RecordingSink"], bool]) -> None:
        """Returns once the condition holds."""
        async with asyncio.timeout(60):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def wait_for_end(self) -> RequestOutput:
        """Returns the last output."""
        await self.wait_for(lambda sink: bool(sink.outputs) and sink.outputs[-1].is_last)
        return self.outputs[-1]


def make_request(
    sink: RecordingSink,
    *,
    request_id: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 8,
    timeout_s: float | None = None,
) -> Request:
    """Returns a request with a fixed seed."""
    now_s = time.monotonic()
    return Request(
        request_id=request_id,
        handle=0,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(seed=SEED, max_tokens=max_tokens),
        sink=sink,
        arrival_s=now_s,
        deadline_s=None if timeout_s is None else now_s + timeout_s,
    )


@dataclass
class Executors:
    """Makes the fake executors of an engine and remembers them; `make` is the factory."""

    config: EngineConfig
    options: dict[str, Any] = field(default_factory=dict)
    made: list[FakeExecutor] = field(default_factory=list)

    def make(self) -> FakeExecutor:
        """Makes the next executor."""
        self.made.append(FakeExecutor(self.config, **self.options))
        return self.made[-1]

    @property
    def last(self) -> FakeExecutor:
        """The executor in use."""
        return self.made[-1]


@dataclass
class RunningCore:
    """A core whose worker is ready."""

    core: EngineCore
    executors: Executors
    readiness: list[bool]
    readiness_changed: asyncio.Event

    async def wait_until_ready(self) -> None:
        """Returns when the engine takes requests."""
        await self._wait_for_readiness(True)

    async def wait_until_lost(self) -> None:
        """Returns when the engine has noticed that its worker is gone."""
        await self._wait_for_readiness(False)

    async def _wait_for_readiness(self, is_ready: bool) -> None:
        async with asyncio.timeout(60):
            while self.core.is_ready != is_ready:
                self.readiness_changed.clear()
                await self.readiness_changed.wait()


@asynccontextmanager
async def running_core(
    config: EngineConfig | None = None, **options: Any
) -> AsyncIterator[RunningCore]:
    """Runs a core around a FakeExecutor made with `options`, once it is ready or asleep."""
    config = config or engine_config()
    executors = Executors(config, options)
    readiness: list[bool] = []
    readiness_changed = asyncio.Event()

    def note(is_ready: bool) -> None:
        readiness.append(is_ready)
        readiness_changed.set()

    core = EngineCore(
        config, limits=step_limits(config), make_executor=executors.make, on_readiness=note
    )
    task = asyncio.create_task(core.run())
    running = RunningCore(core, executors, readiness, readiness_changed)
    try:
        if core.sleep.is_awake:
            await running.wait_until_ready()
        yield running
    finally:
        task.cancel()
        await asyncio.wait({task})


@dataclass
class RunningService:
    """A whole service on a loopback port."""

    server: EngineServer
    executors: Executors
    stub: EngineServiceStub
    channel: grpc.aio.Channel
    port: int

    @property
    def core(self) -> EngineCore:
        """The core of the service."""
        return self.server.core


@asynccontextmanager
async def running_service(
    config: EngineConfig | None = None, *, model: ModelFolder | None = None, **options: Any
) -> AsyncIterator[RunningService]:
    """Serves on a free port with a FakeExecutor made with `options`, once it is ready."""
    config = config or engine_config()
    executors = Executors(config, options)
    server = EngineServer(config, model or model_folder(), executors.make)
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await until(lambda: server.core.is_ready or "start_error" in options)
            yield RunningService(server, executors, EngineServiceStub(channel), channel, port)
    finally:
        await server.stop()
