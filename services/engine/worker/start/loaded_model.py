"""Loads and compiles a model and makes its runners, for a worker and for `octavo replay`."""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog
import torch
from pydantic import ValidationError
from torch import Tensor

from models.batch_invariance import use_batch_invariance
from models.config import ModelConfig
from models.config_sections.pooling import read_pooling
from models.kernels.gpu import use_generic_tables
from models.layers.decoder import CausalLM
from models.loading.loader import load_model
from models.loading.model_config import read_model_config
from models.loading.parameter_count import count_parameters
from models.parallel.collectives import without_other_ranks
from models.parallel.group import PipelineStage
from services.engine.compilation.graphs.piece_wrapper import PieceGraphs
from services.engine.config.compilation import CompilationConfig
from services.engine.config.compilation_level import CompilationLevel
from services.engine.config.engine_config import EngineConfig
from services.engine.config.flags import describe_problems
from services.engine.limits import StepLimits
from services.engine.model_fit import check_batch_invariance, check_data_parallel
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.runner.weight_store import WeightStore
from services.engine.worker.sleep.model_memory import ModelMemory
from services.engine.worker.sleep.releasable_memory import zeros_from
from services.engine.worker.start.added_parts import add_parts
from services.engine.worker.start.all_reduce_choice import Rows, choose_all_reduce
from services.engine.worker.start.device import (
    choose_cache_dtype,
    choose_device,
    choose_dtype,
    dtype_name,
)
from services.engine.worker.start.invariance import check_invariant_weights
from services.engine.worker.start.kv_memory import (
    allocate_kv_cache,
    available_host_bytes,
    block_bytes,
    shared_prefix_tokens,
    state_pages,
)
from services.engine.worker.start.load_log import implementation_of, log_weights
from services.engine.worker.start.model_trace import (
    TRACED_LEVELS,
    ModelTrace,
    import_compiler,
    is_kept,
    trace_of,
)
from services.engine.worker.start.ranks import Ranks
from services.engine.worker.start.warm_up import run_small_steps

if TYPE_CHECKING:
    from services.engine.compilation.compile_model import CompiledModel
    from services.engine.compilation.program.traced_model import TracedModel

log = structlog.get_logger()

Forward = Callable[..., Tensor]
"""Maps input ids [T] and positions [T] to hidden states [T, hidden]."""

TRACED_STEPS = ((1,), (1, 1), (2,), (7,), (1, 5))
"""Prompt lengths of steps that level 1 runs before it serves: decodes, prompts, and both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device, and the limits of its steps."""

    config: EngineConfig
    ranks: Ranks
    model: CausalLM
    weights: WeightStore
    limits: StepLimits
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    load_s: float
    forward: Forward
    """Computes hidden states until a compiled model does: as traced with all passes, or, on levels
    without a trace, as written."""
    traced: "TracedModel | None" = None
    memory: ModelMemory | None = None
    """Holds the weights, and will hold the KV cache, where the worker may sleep."""
    draft_forwards: tuple[Forward, ...] = ()
    """The same for each draft layer; empty where they run as written. No compiler follows."""

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        ranks: Ranks | None = None,
        may_trace_later: bool = False,
        report_progress: Callable[[str], None] = lambda stage: None,
    ) -> "LoadedModel":
        """Chooses device and dtypes, and loads the weights.

        Args:
            config: the engine's.
            ranks: this rank among all; by default it holds the whole model.
            may_trace_later: leaves a model that no earlier start has traced to `with_trace`.
            report_progress: receives each stage.

        Raises:
            ValueError: the configuration does not fit the model or the machine.
        """
        torch.set_num_threads(config.worker.num_threads)
        ranks = ranks or Ranks.single(config)
        device = choose_device(config.worker, ranks.place.device)
        level = config.compilation.level_on(device.type)
        is_invariant = config.worker.batch_invariant
        use_batch_invariance(is_invariant)
        use_generic_tables(is_on=config.worker.gpu_tables == "generic")
        # Inductor joins operations, whose results level 0 rounds one by one.
        flags = {"use_inductor": False} if is_invariant and level in TRACED_LEVELS else {}
        try:
            config = config.with_flags(compilation_level=int(level), **flags)
        except ValidationError as error:
            # The default level is that of the device, and a flag does not work on it.
            raise ValueError("; ".join(describe_problems(EngineConfig, error))) from error
        sees_images = not config.images.language_model_only
        model_config = read_model_config(
            config.checkpoint.model, config.checkpoint.model_impl, sees_images=sees_images
        )
        check_data_parallel(model_config, config.parallel.data_parallel_size)
        if is_invariant:
            check_batch_invariance(
                model_config,
                num_ranks=ranks.group.size,
                moves_experts=config.parallel.eplb_interval > 0,
            )
        is_traced = level in TRACED_LEVELS
        # All ranks run the same program in a step, so all begin with the trace or none does.
        if is_traced and not ranks.least(is_kept(config, model_config, device, ranks.place.rank)):
            is_traced = not may_trace_later
            if is_traced:
                import_compiler()
        dtype = choose_dtype(config.checkpoint, model_config, device)
        cache_dtype = choose_cache_dtype(config.cache, dtype, device)
        log.info(
            "worker_started",
            device=str(device),
            dtype=dtype_name(dtype),
            cache_dtype=dtype_name(cache_dtype),
            model=str(config.checkpoint.model),
            model_impl=implementation_of(model_config),
        )
        choose_all_reduce(config, ranks, Rows.of(config, model_config, dtype, device))
        report_progress("loading weights")
        pooling = read_pooling(
            config.checkpoint.model, config.checkpoint.task, config.checkpoint.score_tokens
        )
        has_draft_layers = config.speculation.num_layer_drafts > 0
        limits = StepLimits.of(
            config,
            max_model_len=config.checkpoint.max_model_len or model_config.max_position_embeddings,
            vocab_size=model_config.vocab_size,
            cache_windows=model_config.entry_windows(with_draft_layers=has_draft_layers),
            cache_spans=model_config.cache_spans,
            sees_images=model_config.vision is not None,
            max_whole_tokens=model_config.max_whole_tokens,
            computes_whole_prompts=model_config.sees_later,
            pooling=None if pooling is None else pooling.method,
        )
        started_s = time.monotonic()
        model = load_model(
            config.checkpoint.model,
            device=device,
            dtype=dtype,
            load_format=config.checkpoint.load_format,
            model_impl=config.checkpoint.model_impl,
            group=ranks.group,
            rounds_to_fp8=config.checkpoint.quantization == "fp8",
            with_draft_layers=has_draft_layers,
            sees_images=sees_images,
            pooling=pooling,
            max_positions=limits.max_model_len,
            on_progress=report_progress,
        )
        weights = WeightStore(model, ranks.group, device=device, dtype=dtype)
        weights.load_at_start(config.weights.apply_weights, report_progress)
        add_parts(model, config, device=device, dtype=dtype, max_positions=limits.max_model_len)
        if is_invariant:
            check_invariant_weights(model, dtype)
        is_shared = ranks.group.of_experts.size > 1
        facts = {"device": device, "dtype": dtype, "available_host_bytes": available_host_bytes}
        memory = ModelMemory.of(config, model, weights, is_shared=is_shared, **facts)
        if model.stage.size > 1:
            limits = limits.of_entries(entries_of(model_config, model.stage))
        pages = state_pages(model, block_size=limits.block_size, dtype=cache_dtype)
        # Stages may hold different layers, and their requests' tables have one form.
        shared = shared_prefix_tokens(
            limits.shared_prefix_tokens,
            model.cache_specs(),
            dtype=cache_dtype,
            device=device,
            num_queries=limits.decode_q_len,
        )
        limits = replace(
            limits, state_pages=-ranks.least(-pages), shared_prefix_tokens=ranks.least(shared)
        )
        load_s = time.monotonic() - started_s
        log.info("weights_loaded", num_parameters=count_parameters(model), load_s=round(load_s, 3))
        log_weights(model)
        loaded = cls(
            config=config,
            ranks=ranks,
            model=model,
            weights=weights,
            limits=limits,
            device=device,
            dtype=dtype,
            cache_dtype=cache_dtype,
            load_s=load_s,
            forward=model,
            memory=memory,
        )
        return loaded.with_trace() if is_traced else loaded

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the KV cache."""
        return block_bytes(
            self.model,
            block_size=self.limits.block_size,
            dtype=self.cache_dtype,
            groups=self.limits.layer_groups,
        )

    @property
    def trace(self) -> ModelTrace:
        """All that the model's programs depend on."""
        return trace_of(self.config, self.model, self.limits, self.device, self.ranks.place.rank)

    def compile(self, settings: CompilationConfig, pieces: PieceGraphs) -> "CompiledModel | None":
        """Compiles the model; returns None where `forward` is all there is. Any thread may call it.

        Args:
            settings: of the level that the model was loaded for.
            pieces: wraps the compiled pieces.
        """
        is_traced_only = settings.level == CompilationLevel.DYNAMO_AS_IS
        traced = self.traced
        if not is_traced_only and (traced is None or self._has_nothing_to_compile(traced)):
            return None
        # The compiler takes 2 s to import, which a worker that compiles nothing must not wait for.
        from services.engine.compilation.compile_model import CompiledModel, TracedForward
        from services.engine.compilation.pieces.piece_compiler import MissingPieceError

        if is_traced_only:
            compiled = CompiledModel(forward=TracedForward(self.model))
            self._run_traced_steps(compiled.forward)
            return compiled
        assert traced is not None, "the levels that compile were traced"
        try:
            return self._compile_traced(traced, settings, pieces)
        except MissingPieceError:
            return self._compile_traced(self.trace.of_model(traces_again=True), settings, pieces)

    def _compile_traced(
        self, traced: "TracedModel", settings: CompilationConfig, pieces: PieceGraphs
    ) -> "CompiledModel":
        from services.engine.compilation.cache.cache_key import compute_factors
        from services.engine.compilation.compile_model import compile_traced

        return compile_traced(
            traced,
            settings,
            piece_wrapper=pieces.wrap if settings.graph_mode(self.device.type) else None,
            max_num_seqs=self.limits.max_num_seqs,
            factors=compute_factors(
                self.config, self.model.config, self.device, rank=self.ranks.place.rank
            ),
            rank=self.ranks.place.rank,
        )

    def _has_nothing_to_compile(self, traced: "TracedModel") -> bool:
        """Returns whether a model consists of our own kernels, or no compiler is wanted."""
        if not self.config.compilation.use_inductor:
            return True
        wants_sizes = bool(self.config.compilation.compile_sizes)
        return traced.has_own_kernels_only and not wants_sizes

    def make_runner(
        self, num_blocks: int, forward: Forward | None = None, *, is_for_serving: bool = False
    ) -> ModelRunner:
        """Allocates a KV cache and a runner's tables.

        Args:
            num_blocks: blocks of the cache.
            forward: computes hidden states; by default `self.forward`.
            is_for_serving: whether the cache goes where a sleeping worker can give it back.
        """
        memory = self.memory.cache if is_for_serving and self.memory is not None else None
        with zeros_from(memory):
            cache = allocate_kv_cache(
                self.model,
                num_blocks=num_blocks,
                block_size=self.limits.block_size,
                dtype=self.cache_dtype,
                device=self.device,
                groups=self.limits.layer_groups,
                num_state_slots=self.limits.num_state_slots,
            )
        runner = ModelRunner(self.model, cache, limits=self.limits, device=self.device)
        if forward is None:
            self.run_in(runner)
        else:
            runner.forward.run_model = forward
        return runner

    def run_in(self, runner: ModelRunner) -> None:
        """Makes a runner of this model run its forward passes."""
        runner.forward.run_model = self.forward
        if self.draft_forwards:
            runner.speculator.run_steps(self.draft_forwards)

    @property
    def lacks_trace(self) -> bool:
        """Whether the level needs a trace that there is not yet."""
        return self.traced is None and self.config.compilation.level in TRACED_LEVELS

    @property
    def will_change(self) -> bool:
        """Whether tracing or compiling it leaves another forward pass to run."""
        if self.lacks_trace or self.config.compilation.level == CompilationLevel.DYNAMO_AS_IS:
            return True
        return self.traced is not None and not self._has_nothing_to_compile(self.traced)

    def with_trace(self) -> "LoadedModel":
        """Returns this model with its trace, as it is if it has one or if its level needs none.

        Raises:
            UnmatchedPassError: a compiler pass matches nothing that the model promises.
        """
        if not self.lacks_trace:
            return self
        from services.engine.compilation.passes.unmatched import UnmatchedPassError
        from services.engine.compilation.pieces.linking import run_as_traced

        started_s = time.monotonic()
        try:
            traced, drafts = self.trace.of_all()
        except UnmatchedPassError:
            raise
        except Exception:  # whatever it is, the model runs as it is written
            if self.ranks.has_others or not self.config.compilation.capture_while_serving:
                raise  # other ranks may have the trace
            log.exception("compilation_failed")
            return self
        log.info(
            "model_traced",
            trace_s=round(time.monotonic() - started_s, 3),
            is_kept=traced.trace is None,
            passes=dict(traced.pass_matches),
        )
        return replace(
            self,
            traced=traced,
            forward=run_as_traced(traced),
            draft_forwards=tuple(run_as_traced(each) for each in drafts),
        )

    def _run_traced_steps(self, forward: Callable[..., Any]) -> None:
        """Runs dummy steps through a forward that is traced at its first call.

        Raises:
            RuntimeError: a later kind of step is traced again.
        """
        runner = self.make_runner(1)
        runner.forward.run_model = forward
        first, *others = TRACED_STEPS
        with without_other_ranks():
            run_small_steps(runner, self.limits, (first,))
        with torch.compiler.set_stance("fail_on_recompile"), without_other_ranks():
            run_small_steps(runner, self.limits, others)


def entries_of(model: ModelConfig, stage: PipelineStage) -> range:
    """Returns the cache entries of a stage's layers among those of the whole model."""
    layers, own = model.entry_layers, stage.layers_of(model.num_hidden_layers)
    return range(bisect_left(layers, own.start), bisect_left(layers, own.stop))
