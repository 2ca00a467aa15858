"""The life of a worker process: load, announce, run steps until the service hangs up."""

import contextlib
import gc
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import NoReturn, Protocol

import structlog
import torch

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.loading.loader import load_model
from protos.engine.v1.worker_pb2 import WorkerEvent, WorkerFailure, WorkerProgress, WorkerReady
from services.engine.batch import BatchDescriptor, StepResult
from services.engine.compilation.cache_key import compute_factors
from services.engine.compilation.compile_model import compile_model
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.compilation.graphs.piece_wrapper import PieceGraphs
from services.engine.compilation_config import CompilationLevel
from services.engine.config import EngineConfig
from services.engine.worker.background_capture import BackgroundCapture
from services.engine.worker.graph_setup import (
    graph_report,
    piece_graphs,
    prepare_graphs,
    wire_keys,
)
from services.engine.worker.kv_memory import allocate_kv_cache, block_bytes, choose_num_blocks
from services.engine.worker.model_runner import ModelRunner
from services.engine.worker.step_arrays import StepLimits
from services.engine.worker.wire import Channel

log = structlog.get_logger()

EXAMPLE_NUM_TOKENS = 8
"""Length of the inputs that a model is traced with; what is compiled runs any."""

POLL_S = 50e-6
"""Pause between looks at a result that the device has not finished, and at the socket."""


def run_worker(config: EngineConfig, channel: Channel, *, rank: int) -> int:
    """Serves steps until the other side hangs up.

    Args:
        config: the engine's configuration.
        channel: the connection to the engine service.
        rank: this worker's number among its peers, and its GPU.

    Returns:
        The exit code: 0 after a hang-up, 1 after a failure, which was reported to the service.
    """
    server = StepServer(channel)
    try:
        started = _start(config, channel, rank, server)
        # torch and the model stay for good; a full collection walks them for 70 ms in mid-step.
        gc.freeze()
        server.serve(started.runner, started.ready, started.capture)
    except EOFError:
        log.info("worker_stopped")
        return 0
    except Exception as error:  # the worker's engine loop: whatever it was ends the worker
        log.exception("worker_failed", step_id=server.step_id)
        _report(channel, error, server.step_id)
        return 1


class Pending(Protocol):
    """A step that was executed; PendingResult."""

    @property
    def is_ready(self) -> bool:
        """Whether `message` returns without waiting."""

    def message(self) -> StepResult:
        """Returns the result."""


class Runner(Protocol):
    """What runs the steps; ModelRunner."""

    def execute(self, descriptor: BatchDescriptor) -> Pending:
        """Runs one step, or queues it on the device."""


class StepServer:
    """The loop between the channel and the runner."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pending: deque[Pending] = deque()
        self.step_id = 0
        """The step read last; 0 before the first."""

    def serve(
        self, runner: Runner, ready: WorkerReady, capture: BackgroundCapture | None = None
    ) -> NoReturn:
        """Announces the worker and runs steps.

        A descriptor that has arrived is launched before any result is waited for, and a result
        that is ready is sent without waiting for a descriptor. Between steps graphs are captured.

        Raises:
            EOFError: the service hung up.
        """
        self._channel.send(WorkerEvent(ready=ready).SerializeToString())
        while True:
            content = self._channel.receive(self._patience_s(capture))
            if content is not None:
                descriptor = BatchDescriptor.FromString(content)
                self.step_id = descriptor.step_id
                self._pending.append(runner.execute(descriptor))
            while self._pending and self._pending[0].is_ready:
                result = self._pending.popleft().message()
                self._channel.send(WorkerEvent(result=result).SerializeToString())
            is_idle = content is None and not self._pending
            if capture is not None and capture.is_due(is_idle=is_idle):
                self.report_graph(capture.run())

    def report_graph(self, outcome: GraphOutcome) -> None:
        """Tells the service what became of a graph."""
        self._channel.send(WorkerEvent(graph=graph_report(outcome)).SerializeToString())

    def _patience_s(self, capture: BackgroundCapture | None) -> float | None:
        """Returns how long to wait for a descriptor; None while there is nothing else to do."""
        if self._pending:
            return POLL_S
        return 0.0 if capture is not None and capture.has_work else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A runner that is ready for steps, and what to tell of it."""

    runner: ModelRunner
    ready: WorkerReady
    capture: BackgroundCapture | None


def _start(config: EngineConfig, channel: Channel, rank: int, server: "StepServer") -> _Started:
    """Loads the model and allocates everything that steps need."""

    def report_progress(stage: str) -> None:
        channel.send(WorkerEvent(progress=WorkerProgress(stage=stage)).SerializeToString())

    torch.set_num_threads(config.num_threads)
    torch.set_num_interop_threads(1)
    device = choose_device(config, rank)
    model_config = ModelConfig.from_folder(config.model)
    dtype = _dtype(config, model_config, device)
    log.info("worker_started", device=str(device), dtype=_name(dtype), model=str(config.model))

    report_progress("loading weights")
    started_s = time.monotonic()
    model = load_model(
        config.model,
        device=device,
        dtype=dtype,
        load_format=config.load_format,
        on_progress=report_progress,
    )
    load_s = time.monotonic() - started_s
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info("weights_loaded", num_parameters=num_parameters, load_s=round(load_s, 3))

    limits = StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len or model_config.max_position_embeddings,
        block_size=config.block_size,
        vocab_size=model_config.vocab_size,
    )
    pieces = piece_graphs(device)
    if config.compilation_config(device.type).level != CompilationLevel.NO_COMPILATION:
        report_progress("compiling the model")
        _compile(config, model, limits, pieces=pieces, device=device, rank=rank)

    report_progress("allocating the KV cache")
    num_blocks = choose_num_blocks(config, model, limits=limits, dtype=dtype, device=device)
    cache = allocate_kv_cache(
        model_config,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        device=device,
    )
    bytes_each = block_bytes(model_config, block_size=config.block_size, dtype=dtype)
    log.info(
        "kv_cache_allocated",
        num_blocks=num_blocks,
        block_bytes=bytes_each,
        total_mb=num_blocks * bytes_each // 2**20,
    )
    runner = ModelRunner(model, cache, limits=limits, device=device)
    prepared = prepare_graphs(
        runner,
        model,
        config.compilation_config(device.type),
        limits=limits,
        pieces=pieces,
        on_fault=server.report_graph,
    )
    outcomes = []
    if not config.capture_while_serving:
        outcomes = prepared.capture_all(report_progress)
    ready = WorkerReady(
        num_blocks=num_blocks,
        block_bytes=bytes_each,
        num_parameters=num_parameters,
        load_s=load_s,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=_name(dtype),
        graphs=[graph_report(outcome) for outcome in outcomes],
        planned_graphs=wire_keys(prepared.graphs.planned),
        cudagraph_mode=str(prepared.mode),
        no_graphs_reason=prepared.no_graphs_reason(enforce_eager=config.enforce_eager),
    )
    log.info("worker_ready", start_s=round(time.monotonic() - started_s, 3))
    capture = BackgroundCapture(prepared.graphs) if config.capture_while_serving else None
    return _Started(runner=runner, ready=ready, capture=capture)


def _compile(
    config: EngineConfig,
    model: CausalLM,
    limits: StepLimits,
    *,
    pieces: PieceGraphs,
    device: torch.device,
    rank: int,
) -> None:
    """Makes the model run at the configured compilation level."""
    settings = config.compilation_config(device.type)
    example_inputs = [
        torch.zeros(EXAMPLE_NUM_TOKENS, dtype=dtype, device=device)
        for dtype in (torch.int32, torch.int64)
    ]
    compile_model(
        model,
        settings,
        example_inputs=example_inputs,
        piece_wrapper=pieces.wrap if settings.cudagraph_mode else None,
        max_num_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        factors=compute_factors(settings, config, device),
        rank=rank,
    )


def choose_device(config: EngineConfig, rank: int) -> torch.device:
    """Returns the device of a rank.

    Raises:
        ValueError: the configuration wants CUDA and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise ValueError("device is cuda, but this machine has no CUDA device that torch can use")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _dtype(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype of weights, activations and cache."""
    name: str = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model_config.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "both configurations know names of dtypes only"
    return dtype


def _name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as configurations write it."""
    return str(dtype).removeprefix("torch.")


def _report(channel: Channel, error: Exception, step_id: int) -> None:
    """Tells the service why this worker cannot go on, unless the service is gone itself."""
    details = "".join(traceback.format_exception(error))
    text = f"{type(error).__name__}: {error}\n{details}"
    failure = WorkerFailure(error=text, step_id=step_id)
    with contextlib.suppress(EOFError):
        channel.send(WorkerEvent(failure=failure).SerializeToString())
