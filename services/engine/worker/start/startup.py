"""How a worker gets from its configuration to the first step."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import torch

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.loading.loader import load_model
from models.loading.parameter_count import count_parameters
from protos.engine.v1.worker_pb2 import WorkerReady
from services.engine.compilation.graphs.capture_plan import wire_key
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.compilation.graphs.piece_wrapper import PieceGraphs
from services.engine.config.compilation import CompilationConfig
from services.engine.config.compilation_level import CompilationLevel
from services.engine.config.engine_config import EngineConfig
from services.engine.kv_cache.cache_groups import group_layers
from services.engine.worker.graphs.background_capture import BackgroundCapture
from services.engine.worker.graphs.background_compile import BackgroundCompile
from services.engine.worker.inputs.step_arrays import StepLimits
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.runner.speculative_runner import make_runner
from services.engine.worker.start.device import (
    choose_cache_dtype,
    choose_device,
    choose_dtype,
    dtype_name,
)
from services.engine.worker.start.graph_setup import (
    PreparedGraphs,
    build_uncaptured_kernels,
    estimate_graph_bytes,
    graph_report,
    install_model,
    piece_graphs,
    prepare_graphs,
    rehearse_first_graphs,
)
from services.engine.worker.start.kernel_building import KernelBuilding
from services.engine.worker.start.kv_memory import (
    allocate_kv_cache,
    block_bytes,
    choose_num_blocks,
    largest_step_bytes,
    probe_runner,
)
from services.engine.worker.start.rehearsal import (
    FIRST_STEPS,
    other_steps,
    run_small_steps,
    small_step_of_everything,
)

if TYPE_CHECKING:
    from services.engine.compilation.compile_model import CompiledModel

log = structlog.get_logger()

EXAMPLE_NUM_TOKENS = 8
"""Length of the inputs that a model is traced with; what is compiled runs any."""

Report = Callable[[str], None]
"""Takes each stage of the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedWorker:
    """A runner that is ready for steps, what to tell of it, and what is still to be captured."""

    runner: ModelRunner
    ready: WorkerReady
    capture: BackgroundCapture | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A model on its device."""

    model: CausalLM
    limits: StepLimits
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    load_s: float


class StageClock:
    """Times stages that follow each other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins the first stage."""
        self._clock = clock
        self._begun_s = self._ended_s = clock()
        self._stages: dict[str, float] = {}

    def end(self, stage: str) -> None:
        """Ends a stage; the next one begins."""
        now_s = self._clock()
        self._stages[f"{stage}_s"] = round(now_s - self._ended_s, 3)
        self._ended_s = now_s

    def seconds(self) -> dict[str, float]:
        """Returns the time of all stages that have ended, and of each, for a line of the log."""
        return {"start_s": round(self._ended_s - self._begun_s, 3), **self._stages}


def start_worker(
    config: EngineConfig,
    *,
    rank: int,
    report_progress: Report,
    on_fault: Callable[[GraphOutcome], None],
) -> StartedWorker:
    """Loads the model and allocates everything that steps need.

    Unless told otherwise, it leaves compilation and capture to the time between steps.

    Args:
        config: the engine's.
        rank: number of the GPU; an engine has one worker, of rank 0.
        report_progress: hears of each stage.
        on_fault: hears of a graph that is given up while serving.

    Raises:
        ValueError: the configuration does not fit the model or the machine.
    """
    clock = StageClock()
    kernels = KernelBuilding.fork(config)
    torch.set_num_threads(config.worker.num_threads)
    torch.set_num_interop_threads(1)
    loaded = _load(config, rank, report_progress)
    settings = config.compilation
    _warn_of_idle_flags(settings, loaded.device)
    pieces = piece_graphs(loaded.device, loaded.dtype)
    clock.end("load")

    def compile_loaded() -> "CompiledModel | None":
        kernels.build_others()
        if loaded.device.type == "cuda":
            others = other_steps(loaded.model.config, loaded.limits)
            run_small_steps(_probe(loaded), loaded.limits, others)
            _probe(loaded).execute(small_step_of_everything(loaded.limits))
        if settings.level == CompilationLevel.NO_COMPILATION:
            return None
        return _compile(config, settings, loaded, pieces=pieces, rank=rank)

    step_bytes = None
    if loaded.device.type == "cuda":
        report_progress("building kernels")
        step_bytes = _build_first_kernels(loaded, settings, kernels)
    clock.end("kernels")
    compiled = None
    if not settings.capture_while_serving:
        if settings.level != CompilationLevel.NO_COMPILATION:
            report_progress("compiling the model")
        compiled = compile_loaded()
        clock.end("compile")
    report_progress("allocating the KV cache")
    runner, num_blocks = _make_runner(config, settings, loaded, step_bytes)
    clock.end("memory")

    def install(compiled: "CompiledModel | None") -> None:
        install_model(runner, compiled, settings, pieces)

    prepared = prepare_graphs(
        runner, settings, limits=loaded.limits, pieces=pieces, on_fault=on_fault
    )
    if loaded.device.type == "cuda":
        build_uncaptured_kernels(prepared, loaded.limits)
    outcomes: list[GraphOutcome] = []
    capture = None
    if settings.capture_while_serving:
        compilation = BackgroundCompile(compile_loaded, install)
        capture = BackgroundCapture(prepared.graphs, compilation=compilation)
    else:
        install(compiled)
        outcomes = prepared.capture_all(report_progress)
    ready = _announcement(config, loaded, num_blocks, prepared)
    ready.graphs.extend(graph_report(outcome) for outcome in outcomes)
    clock.end("graphs")
    log.info("worker_ready", **clock.seconds())
    return StartedWorker(runner=runner, ready=ready, capture=capture)


def _warn_of_idle_flags(settings: CompilationConfig, device: torch.device) -> None:
    if settings.enforce_eager:
        return
    for flag, reach in settings.idle_flags(device.type):
        log.warning("flag_without_effect", flag=f"--{flag.replace('_', '-')}", works=str(reach))


def _load(config: EngineConfig, rank: int, report_progress: Report) -> _Loaded:
    device = choose_device(config, rank)
    model_config = ModelConfig.from_folder(config.checkpoint.model)
    dtype = choose_dtype(config, model_config, device)
    cache_dtype = choose_cache_dtype(config, model_config, dtype, device)
    log.info(
        "worker_started",
        device=str(device),
        dtype=dtype_name(dtype),
        cache_dtype=dtype_name(cache_dtype),
        model=str(config.checkpoint.model),
    )
    report_progress("loading weights")
    max_model_len = config.checkpoint.max_model_len or model_config.max_position_embeddings
    started_s = time.monotonic()
    model = load_model(
        config.checkpoint.model,
        device=device,
        dtype=dtype,
        load_format=config.checkpoint.load_format,
        with_draft_layers=config.speculation.num_speculative_tokens > 0,
        max_positions=max_model_len,
        on_progress=report_progress,
    )
    load_s = time.monotonic() - started_s
    log.info("weights_loaded", num_parameters=count_parameters(model), load_s=round(load_s, 3))
    limits = StepLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.cache.block_size,
        vocab_size=model_config.vocab_size,
        cache_groups=group_layers(model_config.sliding_windows, max_model_len=max_model_len),
        num_speculative_tokens=config.speculation.num_speculative_tokens,
    )
    return _Loaded(
        model=model,
        limits=limits,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        load_s=load_s,
    )


def _compile(
    config: EngineConfig,
    settings: CompilationConfig,
    loaded: _Loaded,
    *,
    pieces: PieceGraphs,
    rank: int,
) -> "CompiledModel":
    """Compiles the model at the configured level; this may be another thread than the steps'."""
    # The compiler takes 2 s to import, which a worker that compiles nothing must not wait for.
    from services.engine.compilation.cache_key import compute_factors
    from services.engine.compilation.compile_model import compile_model

    device, limits = loaded.device, loaded.limits
    if device.type == "cuda":
        torch.cuda.set_device(device)
    example_inputs = [
        torch.zeros(EXAMPLE_NUM_TOKENS, dtype=dtype, device=device)
        for dtype in (torch.int32, torch.int64)
    ]
    return compile_model(
        loaded.model,
        settings,
        example_inputs=example_inputs,
        piece_wrapper=pieces.wrap if settings.graph_mode(device.type) else None,
        max_num_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        factors=compute_factors(config, device),
        rank=rank,
    )


def _probe(loaded: _Loaded) -> ModelRunner:
    """Returns a runner for steps of nobody's."""
    return probe_runner(
        loaded.model, limits=loaded.limits, dtype=loaded.cache_dtype, device=loaded.device
    )


def _build_first_kernels(
    loaded: _Loaded, settings: CompilationConfig, kernels: KernelBuilding
) -> int | None:
    """Builds the kernels that take a part before the worker is ready, and those of first steps.

    Returns:
        What the largest step takes, if that was found out.
    """
    limits, runner = loaded.limits, _probe(loaded)
    step_bytes = []
    kernels.build_first(
        lambda: run_small_steps(runner, limits, FIRST_STEPS),
        next_=lambda: rehearse_first_graphs(runner, settings, limits=limits),
        soon=lambda: step_bytes.append(largest_step_bytes(runner, limits)),
        others=lambda: run_small_steps(runner, limits, other_steps(loaded.model.config, limits)),
    )
    return step_bytes[0] if step_bytes else None


def _make_runner(
    config: EngineConfig, settings: CompilationConfig, loaded: _Loaded, step_bytes: int | None
) -> tuple[ModelRunner, int]:
    """Allocates the KV cache and what steps need; returns the runner and the number of blocks."""
    model, limits, dtype, device = loaded.model, loaded.limits, loaded.cache_dtype, loaded.device
    num_blocks = choose_num_blocks(
        config,
        model,
        limits=limits,
        dtype=dtype,
        device=device,
        graph_bytes=lambda runner: estimate_graph_bytes(runner, settings, limits=limits),
        step_bytes=step_bytes,
    )
    cache = allocate_kv_cache(
        model,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        dtype=dtype,
        device=device,
        groups=limits.cache_groups,
    )
    bytes_each = _block_bytes(loaded)
    log.info(
        "kv_cache_allocated",
        num_blocks=num_blocks,
        block_bytes=bytes_each,
        total_mb=num_blocks * bytes_each // 2**20,
    )
    return make_runner(model, cache, limits=limits, device=device), num_blocks


def _announcement(
    config: EngineConfig, loaded: _Loaded, num_blocks: int, prepared: PreparedGraphs
) -> WorkerReady:
    model, device, dtype = loaded.model, loaded.device, loaded.dtype
    return WorkerReady(
        num_blocks=num_blocks,
        block_bytes=_block_bytes(loaded),
        group_windows=[group.window or 0 for group in loaded.limits.cache_groups],
        num_parameters=count_parameters(model),
        load_s=loaded.load_s,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=dtype_name(dtype),
        planned_graphs=map(wire_key, prepared.graphs.planned),
        cudagraph_mode=str(prepared.mode),
        no_graphs_reason=prepared.no_graphs_reason(enforce_eager=config.compilation.enforce_eager),
    )


def _block_bytes(loaded: _Loaded) -> int:
    limits = loaded.limits
    return block_bytes(
        loaded.model,
        block_size=limits.block_size,
        dtype=loaded.cache_dtype,
        groups=limits.cache_groups,
    )
