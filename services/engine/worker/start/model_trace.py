"""Traces a loaded model, here or in another process, or finds what an earlier start traced."""

import importlib
import io
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.config_sections.pooling import read_pooling
from models.deepseek_mtp import DeepseekMTP
from models.layers.decoder import CausalLM
from models.loading.loader import config_to_load
from services.engine.config.compilation_level import CompilationLevel
from services.engine.config.engine_config import EngineConfig
from services.engine.limits import StepLimits
from services.engine.worker.start.build_processes import BACKGROUND_NICENESS, BuildProcesses

if TYPE_CHECKING:
    from services.engine.compilation.cache.artifact_cache import ArtifactCache
    from services.engine.compilation.cache.cache_key import Factors
    from services.engine.compilation.program.traced_model import TracedModel

log = structlog.get_logger()

TRACED_LEVELS = (CompilationLevel.DYNAMO_ONCE, CompilationLevel.PIECEWISE)

EXAMPLE_NUM_TOKENS = 8
"""Length of the traced inputs; compiled code runs any length."""

MODEL_PROGRAM = "model"
"""Name of the model's program on disk."""
FIRST_DRAFT = "draft_0"
"""Name of the first draft layer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTrace:
    """All that the programs of a model and of its draft layers depend on.

    cache: the programs on disk. factors: facts that these depend on. max_num_tokens: most tokens in
    one step.
    """

    config: EngineConfig
    model: CausalLM
    cache: "ArtifactCache"
    factors: "Factors"
    max_num_tokens: int
    rank: int

    @property
    def example_inputs(self) -> list[Tensor]:
        """Inputs of the model with the kinds of a step's."""
        kinds = (torch.int32, torch.int64)
        model, device = self.model, next(self.model.parameters()).device
        first, positions = (
            torch.zeros(EXAMPLE_NUM_TOKENS, dtype=kind, device=device) for kind in kinds
        )
        if not model.stage.is_first:
            size = model.config.stream_size
            first = torch.zeros(len(first), size, dtype=model.dtype, device=device)
        return [first, positions]

    def of_all(self) -> "tuple[TracedModel, list[TracedModel]]":
        """Returns the traces of the model and of its draft layers."""
        traced = self.of_model()
        drafts = []
        if self.config.speculation.num_layer_drafts:
            inputs = self.example_inputs
            hidden = torch.zeros(len(inputs[0]), self.model.output_size)
            inputs.append(hidden.to(inputs[0].device, self.model.dtype))
            drafts = [
                self._of(step, f"draft_{number}", (), inputs)
                for number, step in enumerate(DeepseekMTP(self.model).steps)
            ]
        return traced, drafts

    def of_model(self, *, traces_again: bool = False) -> "TracedModel":
        """Returns the trace of the model.

        Args:
            traces_again: even if an earlier start has traced it.
        """
        layers, inputs = self.model.decoder_layers, self.example_inputs
        return self._of(self.model, MODEL_PROGRAM, layers, inputs, traces_again=traces_again)

    def _of(
        self,
        module: nn.Module,
        name: str,
        layers: Sequence[nn.Module],
        inputs: Sequence[Tensor],
        *,
        traces_again: bool = False,
    ) -> "TracedModel":
        from services.engine.compilation.cache.program_store import load_program, store_program
        from services.engine.compilation.program.compile_range import compile_ranges

        settings = self.config.compilation
        ranges = compile_ranges(settings.compile_ranges, self.max_num_tokens)
        if not (traces_again or _needs_graphs(self.config)):
            kept = load_program(self.cache, name, model=module, layers=layers, ranges=ranges)
            if kept is not None:
                return kept
        from services.engine.compilation.compile_model import debug_dump
        from services.engine.compilation.trace.tracing import trace_programs

        traced = trace_programs(
            module,
            settings,
            example_inputs=inputs,
            max_num_tokens=self.max_num_tokens,
            dump=debug_dump(settings, self.rank) if module is self.model else None,
        )
        self.cache.describe(self.factors)
        store_program(self.cache, name, traced, module)
        return traced


class TraceProcess:
    """Traces a model in another process, which leaves the programs on disk.

    A tracer in a thread of the worker would take half of Python's time from the steps.
    """

    def __init__(self, processes: BuildProcesses) -> None:
        self._processes = processes
        self._ordered: range | None = None

    @classmethod
    def fork(cls, config: EngineConfig) -> "TraceProcess | None":
        """Forks the process, while this one has no other threads; it imports the compiler.

        Returns:
            None where nothing is traced while serving, or no processor is left for it.
        """
        if not config.compilation.capture_while_serving or _needs_graphs(config):
            return None
        may_have_gpu = torch.version.cuda and config.worker.device != "cpu"
        level = config.compilation.level_on("cuda" if may_have_gpu else "cpu")
        if level not in TRACED_LEVELS or len(os.sched_getaffinity(0)) == 1:
            return None
        return cls(BuildProcesses.fork(_prepare_process))

    def begin(self, trace: ModelTrace) -> None:
        """Begins to trace a model."""
        try:
            build = TraceBuild(trace)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            log.info("traced_in_this_process", reason=str(error))
            return
        self._ordered = self._processes.begin([build], niceness=BACKGROUND_NICENESS)

    def finish(self) -> None:
        """Waits for the programs, if any were begun, and ends the process."""
        if self._ordered is not None:
            report = self._processes.wait(self._ordered)
            if report.num_failed:
                log.info("traced_in_this_process", reason=report.error)
        self._processes.stop()


class TraceBuild:
    """The work of a `TraceProcess`. Programs name weights and no device, so it needs neither."""

    def __init__(self, trace: ModelTrace) -> None:
        """Takes the model without the content of its tensors.

        Raises:
            pickle.PicklingError, TypeError, AttributeError: the model cannot be sent.
        """
        content = io.BytesIO()
        _ShapesPickler(content).dump(trace)
        self._content = content.getvalue()

    def build(self) -> None:
        """Traces the model and keeps its programs.

        Raises:
            ValueError: a compiler has code to generate, which depends on the device.
        """
        trace: ModelTrace = _ShapesUnpickler(io.BytesIO(self._content)).load()
        traced, drafts = trace.of_all()
        if trace.config.compilation.use_inductor and not all(
            each.has_own_kernels_only for each in (traced, *drafts)
        ):
            raise ValueError("a compiler has code to generate")


class _ShapesPickler(pickle.Pickler):
    """Writes tensors without their content."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        # Kept alive, so that no two tensors have the same id.
        self._tensors: dict[int, Tensor] = {}

    def persistent_id(self, value: Any) -> Any:
        """Returns what a tensor is made from; None for all else."""
        if not isinstance(value, Tensor):
            return None
        self._tensors[id(value)] = value
        is_parameter = isinstance(value, nn.Parameter)
        return id(value), tuple(value.shape), value.stride(), value.dtype, is_parameter


class _ShapesUnpickler(pickle.Unpickler):
    """Reads tensors as tensors without content, on the meta device."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        """Returns the same tensor for the same number."""
        number, shape, stride, dtype, is_parameter = pid
        if number not in self._tensors:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            self._tensors[number] = (
                nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            )
        return self._tensors[number]


def is_kept(config: EngineConfig, model: ModelConfig, device: torch.device, rank: int) -> bool:
    """Returns whether an earlier start has traced the model and its draft layers, for its steps.

    model: the configuration of the model's folder.
    """
    from services.engine.compilation.cache.program_store import holds_program
    from services.engine.compilation.program.compile_range import compile_ranges

    if _needs_graphs(config):
        return False
    cache, _ = _kept_traces(config, traced_config(config, model), device, rank)
    most = config.max_num_batched_tokens
    ranges = compile_ranges(config.compilation.compile_ranges, most)
    names = [MODEL_PROGRAM, *([FIRST_DRAFT] if config.speculation.num_layer_drafts else [])]
    return all(holds_program(cache, name, ranges) for name in names)


def traced_config(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Returns the configuration of the model that an engine loads, which traces depend on.

    model: the configuration of the model's folder.
    """
    checkpoint = config.checkpoint
    return config_to_load(
        model,
        checkpoint.model,
        rounds_to_fp8=checkpoint.quantization == "fp8",
        pooling=read_pooling(checkpoint.model, checkpoint.task, checkpoint.score_tokens),
        max_positions=checkpoint.max_model_len or model.max_position_embeddings,
    )


def _kept_traces(
    config: EngineConfig, model: ModelConfig, device: torch.device, rank: int
) -> "tuple[ArtifactCache, Factors]":
    """Returns a rank's traces of this configuration on disk, and what they depend on."""
    from services.engine.compilation.cache.artifact_cache import TRACES, ArtifactCache
    from services.engine.compilation.cache.cache_key import trace_factors

    facts = trace_factors(config, model, device, rank=rank)
    return ArtifactCache.open(config.compilation.code_dir / TRACES, facts), facts


def trace_of(
    config: EngineConfig, model: CausalLM, limits: StepLimits, device: torch.device, rank: int
) -> ModelTrace:
    """Returns the trace of a loaded model, not made yet."""
    cache, factors = _kept_traces(config, model.config, device, rank)
    return ModelTrace(
        config=config,
        model=model,
        cache=cache,
        factors=factors,
        max_num_tokens=limits.max_num_batched_tokens,
        rank=rank,
    )


def import_compiler() -> None:
    """Begins to import the compiler, which takes 2 s, in parallel to the loading of weights."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compiler")
    thread.submit(_load_compiler)
    thread.shutdown(wait=False)


def _load_compiler() -> None:
    importlib.import_module("services.engine.compilation.compile_model")


def _prepare_process() -> None:
    """Makes a forked process ready for a `TraceBuild`, without a GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _load_compiler()


def _needs_graphs(config: EngineConfig) -> bool:
    """Returns whether a dump or tuned sizes need the graphs themselves."""
    settings = config.compilation
    return bool(settings.debug_dump_path or settings.compile_sizes)
