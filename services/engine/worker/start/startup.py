"""Brings a worker from its configuration to the first step."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import structlog
import torch

from models.loading.digest import checkpoint_digest
from models.loading.parameter_count import count_parameters, count_whole
from models.parallel.collectives import without_other_ranks
from protos.engine.v1.worker_pb2 import CompileReport, KeptWeights, RankInfo, WorkerReady
from services.engine.compilation.graphs.capture_plan import wire_key
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.config.compilation import CompilationConfig
from services.engine.config.compilation_level import CompilationLevel
from services.engine.config.engine_config import EngineConfig
from services.engine.kv_cache.host_tier import DiskNews, HostLimits
from services.engine.limits import StepLimits
from services.engine.worker.graphs.background_capture import BackgroundCapture
from services.engine.worker.graphs.background_compile import BackgroundCompile
from services.engine.worker.meeting import Meeting
from services.engine.worker.placement import RankPlace
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.runner.weight_store import WeightStore
from services.engine.worker.sleep.model_memory import ModelMemory
from services.engine.worker.start.device import choose_device, dtype_name
from services.engine.worker.start.graph_setup import (
    PreparedGraphs,
    build_uncaptured_kernels,
    estimate_graph_bytes,
    graph_report,
    piece_graphs,
    prepare_graphs,
    warm_up_first_graphs,
)
from services.engine.worker.start.host_tier import add_host_memory, staging_bytes
from services.engine.worker.start.kernel_building import KernelBuilding
from services.engine.worker.start.kv_memory import (
    available_host_bytes,
    check_host_memory,
    choose_num_blocks,
    largest_step_bytes,
)
from services.engine.worker.start.loaded_model import LoadedModel
from services.engine.worker.start.model_compilation import ModelCompilation
from services.engine.worker.start.model_trace import TraceProcess
from services.engine.worker.start.ranks import Ranks
from services.engine.worker.start.warm_up import (
    FIRST_STEPS,
    early_steps,
    gates_of,
    later_steps,
    run_small_steps,
)

log = structlog.get_logger()

Report = Callable[[str], None]
"""Takes each stage of the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedWorker:
    """A runner ready for steps, its announcement, the graphs to capture and the memory to free."""

    runner: ModelRunner
    ready: WorkerReady
    capture: BackgroundCapture | None
    ranks: Ranks
    weights: WeightStore
    memory: ModelMemory | None = None


class StageClock:
    """Times consecutive stages."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = self._ended_s = clock()
        self._stages: dict[str, float] = {}

    def end(self, stage: str) -> None:
        """Ends a stage and begins the next."""
        now_s = self._clock()
        self._stages[f"{stage}_s"] = round(now_s - self._ended_s, 3)
        self._ended_s = now_s

    def seconds(self) -> dict[str, float]:
        """Returns the total and each ended stage's time, for a log line."""
        return {"start_s": round(self._ended_s - self._begun_s, 3), **self._stages}


def start_worker(
    config: EngineConfig,
    *,
    place: RankPlace,
    meeting: Meeting | None = None,
    report_progress: Report,
    on_fault: Callable[[GraphOutcome], None],
    on_compiled: Callable[[CompileReport], None],
    report_disk: Callable[[DiskNews], None] = lambda news: None,
) -> StartedWorker:
    """Loads the model and allocates everything that steps need.

    By default it leaves compilation and capture to the time between steps. A model that no earlier
    start has traced runs as it is written until then.

    Args:
        config: the engine's.
        place: this rank's.
        meeting: where it finds the other ranks; None for a single rank.
        report_progress: receives each stage.
        on_fault: receives a graph that is given up while serving.
        on_compiled: receives the report of a model that was traced or compiled while serving.
        report_disk: receives news of blocks on disk, in any thread.

    Raises:
        ValueError: the configuration does not fit the model or the machine.
    """
    clock = StageClock()
    tracer = TraceProcess.fork(config)
    kernels = KernelBuilding.fork(config.worker)
    torch.set_num_interop_threads(1)
    ranks = _join(config, place, meeting, report_progress, clock)
    loaded = LoadedModel.load(
        config,
        ranks=ranks,
        may_trace_later=config.compilation.capture_while_serving,
        report_progress=report_progress,
    )
    settings = loaded.config.compilation
    _warn_of_idle_flags(settings, loaded.device)
    pieces = piece_graphs(loaded.device, loaded.dtype)
    clock.end("load")

    compilation = ModelCompilation(loaded, pieces, kernels, tracer)
    step_bytes = None
    if loaded.device.type == "cuda":
        report_progress("building kernels")
        step_bytes = _build_first_kernels(loaded, settings, kernels)
    clock.end("kernels")
    if not settings.capture_while_serving:
        if settings.level != CompilationLevel.NO_COMPILATION:
            report_progress("compiling the model")
        compilation.run()
        clock.end("compile")
    report_progress("allocating the KV cache")
    num_own_blocks = _choose_num_blocks(loaded, settings, step_bytes)
    num_blocks = ranks.least(num_own_blocks)
    runner = loaded.make_runner(num_blocks, is_for_serving=True)
    host = add_host_memory(loaded, runner, report_disk)
    clock.end("memory")

    compilation.install(runner)
    prepared = prepare_graphs(
        runner,
        settings,
        limits=loaded.limits,
        pieces=pieces,
        on_fault=on_fault,
        agree=ranks.common_fault,
    )
    ranks.require_same({"plan of graphs": " ".join(map(str, prepared.graphs.planned))})
    if loaded.device.type == "cuda":
        build_uncaptured_kernels(prepared, loaded.limits)
    outcomes: list[GraphOutcome] = []
    capture = None
    if settings.capture_while_serving:
        if config.parallel.data_parallel_size == 1:  # others have steps that miss other graphs
            prepared.graphs.begin_early(are_provisional=compilation.changes_model)
        background = BackgroundCompile(
            compilation.run,
            lambda: compilation.install(runner, on_compiled),
            agree=ranks.common_fault,
        )
        capture = BackgroundCapture(prepared.graphs, compilation=background)
    else:
        outcomes = prepared.capture_all(report_progress)
    ready = _announcement(loaded, num_blocks, prepared, compilation.report, host)
    ready.ranks.append(_rank_info(loaded, num_own_blocks))
    ready.graphs.extend(graph_report(outcome) for outcome in outcomes)
    if runner.experts.layout is not None:
        ready.experts.CopyFrom(runner.experts.layout)
        runner.experts.forget_load()
    clock.end("graphs")
    log.info("worker_ready", **clock.seconds())
    return StartedWorker(
        runner=runner,
        ready=ready,
        capture=capture,
        ranks=ranks,
        weights=loaded.weights,
        memory=loaded.memory,
    )


def _join(
    config: EngineConfig,
    place: RankPlace,
    meeting: Meeting | None,
    report_progress: Report,
    clock: StageClock,
) -> Ranks:
    """Meets the other ranks, if any, and checks that all have the same checkpoint and code.

    It checks first that this machine has what the configuration asks for.
    """
    device = choose_device(config.worker, place.device)
    if device.type == "cpu" and config.cache.num_kv_blocks is None:
        check_host_memory(config.cache.kv_cache_memory_mb * 2**20, available_host_bytes())
    if config.parallel.devices is not None and device.type == "cpu":
        raise ValueError("--devices lists GPUs, and this machine has none that torch can use")
    if config.parallel.num_ranks == 1 or meeting is None:
        return Ranks.single(config)
    report_progress("joining the ranks")
    ranks = Ranks.join(config, place, device, meeting)
    checkpoint = config.checkpoint
    facts = {
        "version of torch": str(torch.__version__),
        "checkpoint": checkpoint_digest(checkpoint.model, checkpoint.load_format),
    }
    ranks.require_same(facts)
    clock.end("join")
    return ranks


def _warn_of_idle_flags(settings: CompilationConfig, device: torch.device) -> None:
    if settings.enforce_eager:
        return
    for flag, reach in settings.idle_flags(device.type):
        log.warning("flag_without_effect", flag=f"--{flag.replace('_', '-')}", works=str(reach))


@without_other_ranks()
def _build_first_kernels(
    loaded: LoadedModel, settings: CompilationConfig, kernels: KernelBuilding
) -> int | None:
    """Builds the kernels used before the worker is ready and by first steps.

    Returns:
        The memory of the largest step, in bytes; None if not measured.
    """
    limits, runner, config = loaded.limits, loaded.make_runner(1), loaded.model.config
    step_bytes = []
    kernels.build_first(
        lambda: run_small_steps(runner, limits, FIRST_STEPS),
        early=lambda: run_small_steps(runner, limits, early_steps(config, limits)),
        next_=lambda: warm_up_first_graphs(runner, settings, limits=limits),
        soon=lambda: step_bytes.append(largest_step_bytes(runner, limits)),
        others=lambda: run_small_steps(
            runner, limits, later_steps(config, limits, gates_of(loaded.model))
        ),
    )
    return step_bytes[0] if step_bytes else None


@without_other_ranks()
def _choose_num_blocks(
    loaded: LoadedModel, settings: CompilationConfig, step_bytes: int | None
) -> int:
    limits, bytes_each = loaded.limits, loaded.block_bytes
    num_blocks = choose_num_blocks(
        loaded.config.cache,
        loaded.model,
        limits=limits,
        dtype=loaded.cache_dtype,
        device=loaded.device,
        graph_bytes=lambda runner: (
            estimate_graph_bytes(runner, settings, limits=limits) + staging_bytes(loaded)
        ),
        step_bytes=step_bytes,
        forward=loaded.forward,
    )
    if loaded.device.type == "cpu":
        check_host_memory(num_blocks * bytes_each, available_host_bytes())
    log.info(
        "kv_cache_allocated",
        num_blocks=num_blocks,
        block_bytes=bytes_each,
        total_mb=num_blocks * bytes_each // 2**20,
        **_state_facts(limits, num_blocks),
    )
    return num_blocks


def _state_facts(limits: StepLimits, num_blocks: int) -> dict[str, int]:
    """Returns what the log says of states: blocks of one, and how many the cache holds."""
    size = limits.num_state_blocks
    return {"blocks_of_a_state": size, "max_states": (num_blocks - 1) // size} if size else {}


def _rank_info(loaded: LoadedModel, num_blocks: int) -> RankInfo:
    place = loaded.ranks.place
    return RankInfo(
        rank=place.rank,
        tensor_parallel_rank=place.tensor_parallel_rank,
        pipeline_parallel_rank=place.pipeline_parallel_rank,
        data_parallel_rank=place.data_parallel_rank,
        pid=os.getpid(),
        device=str(loaded.device),
        num_parameters=count_parameters(loaded.model),
        num_blocks=num_blocks,
    )


def _num_parameters(loaded: LoadedModel) -> int:
    """Returns the model's parameters, of all ranks together."""
    model = loaded.model
    if not loaded.ranks.has_others or model.config.transformers is not None:
        return count_parameters(model)
    return count_whole(model.config)


def _announcement(
    loaded: LoadedModel,
    num_blocks: int,
    prepared: PreparedGraphs,
    report: CompileReport | None,
    host: HostLimits | None,
) -> WorkerReady:
    device = loaded.device
    host = host or HostLimits(num_slots=0, max_step_loads=0)
    return WorkerReady(
        num_host_slots=host.num_slots,
        max_step_loads=host.max_step_loads,
        block_load_s=host.block_load_s,
        has_disk=host.disk_entries is not None,
        disk_entries=b"".join(host.disk_entries or ()),
        num_blocks=num_blocks,
        state_pages=loaded.limits.state_pages,
        shared_prefix_tokens=loaded.limits.shared_prefix_tokens or 0,
        block_bytes=loaded.block_bytes,
        num_parameters=_num_parameters(loaded),
        load_s=loaded.load_s,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=dtype_name(loaded.dtype),
        planned_graphs=map(wire_key, prepared.graphs.planned),
        cudagraph_mode=str(prepared.choice.mode),
        cudagraph_mode_reason=prepared.choice.reason,
        no_graphs_reason=prepared.no_graphs_reason(
            enforce_eager=loaded.config.compilation.enforce_eager
        ),
        compiled=report,
        weights=[KeptWeights(**asdict(each)) for each in loaded.model.weight_formats],
    )
