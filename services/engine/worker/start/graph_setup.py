"""Plans a worker's graphs, makes their recorders, and reports the graphs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import torch

from models.batch_invariance import is_batch_invariant
from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.forward_context import GraphKey
from models.layers.attention import Attention
from models.layers.cache_entry import CacheEntry
from models.layers.drafting import DraftingModel
from models.layers.latent_attention import LatentAttention
from models.layers.state_mixer import StateMixer
from models.ops.attention.cudagraph_support import AttentionCGSupport
from models.parallel.collectives import without_other_ranks
from models.state_cache import StateCacheData
from protos.engine.v1.worker_pb2 import GraphReport, GraphState
from services.engine import batch
from services.engine.compilation.graphs.capture_plan import (
    GraphSupport,
    ModeChoice,
    adapter_free_keys,
    encoder_key,
    full_decode_key,
    graph_support,
    planned_keys,
    sharing_keys,
    supported_mode,
    wire_key,
    with_draft_keys,
)
from services.engine.compilation.graphs.cuda_recorder import CUDAGraphRecorder
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.compilation.graphs.piece_wrapper import PieceGraphs
from services.engine.compilation.graphs.replay_recorder import ReplayRecorder
from services.engine.config.compilation import DEFAULT_SPLITTING_OPS, CompilationConfig
from services.engine.config.compilation_level import CompilationLevel
from services.engine.limits import LEAST_SHARING_REQUESTS, StepLimits
from services.engine.worker.graphs.encoder_program import EncoderProgram, most_shared_patches
from services.engine.worker.graphs.graph_set import GraphSet
from services.engine.worker.graphs.whole_graphs import WholeGraphs
from services.engine.worker.inputs.copied_inputs import CopiedInputs
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.start.warm_up import prompts_of, run_small_steps

if TYPE_CHECKING:
    from services.engine.compilation.compile_model import CompiledModel

log = structlog.get_logger()

MIN_GRAPH_BYTES = 2**20
"""Least memory of a graph, for its nodes in the driver."""

MAX_UNDER_TEST = 4
"""Graphs under test before serving: large ones keep the device busy for longer than the
host, small ones the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedGraphs:
    """The graphs to capture, before any capture."""

    choice: ModeChoice
    graphs: GraphSet

    @property
    def mode(self) -> CUDAGraphMode:
        """The kinds of graphs."""
        return self.choice.mode

    def capture_all(self, report_progress: Callable[[str], None]) -> list[GraphOutcome]:
        """Captures all planned graphs; smaller ones reuse the memory of larger ones.

        Decodes that share prefixes or have no adapters are among them, as far as there is room.
        """
        outcomes: list[GraphOutcome] = []
        for key in self.graphs.on_demand:
            if key.kind is GraphKind.DECODE:
                self.graphs.want(key)
        num_planned = self.graphs.num_pending
        while self.graphs.num_pending:
            outcome = self.graphs.capture_slice(max_under_test=MAX_UNDER_TEST)
            if outcome is None:
                continue
            outcomes.append(outcome)
            report_progress(f"captured graphs {len(outcomes)}/{num_planned}")
        if outcomes:
            log.info(
                "graphs_captured",
                num_graphs=sum(not outcome.fault for outcome in outcomes),
                num_planned=num_planned,
                capture_s=round(sum(outcome.capture_s for outcome in outcomes), 3),
                total_mb=sum(outcome.num_bytes for outcome in outcomes) // 2**20,
            )
        return outcomes

    def no_graphs_reason(self, *, enforce_eager: bool) -> batch.FallbackReason:
        """Returns why steps run without graphs if none is planned."""
        if self.graphs.planned:
            return batch.FallbackReason.FALLBACK_REASON_UNSPECIFIED
        if enforce_eager:
            return batch.FallbackReason.FALLBACK_REASON_ENFORCE_EAGER
        return batch.FallbackReason.FALLBACK_REASON_UNSUPPORTED


def prepare_graphs(
    runner: ModelRunner,
    config: CompilationConfig,
    *,
    limits: StepLimits,
    pieces: PieceGraphs,
    on_fault: Callable[[GraphOutcome], None],
    agree: Callable[[str], str] = str,
    keys: Sequence[GraphKey] | None = None,
) -> PreparedGraphs:
    """Plans a runner's graphs and lets it use them once captured.

    Args:
        runner: the worker's.
        config: the wanted graphs.
        limits: the worker's.
        pieces: the model's, possibly wrapped later; their recorder records all graphs.
        on_fault: receives a graph that is given up while serving.
        agree: as for `GraphSet`.
        keys: graphs of the configured mode to capture, decode graphs first; by default those of the
            configured sizes, and those of steps that share prefixes or have no adapters on demand.

    Raises:
        ValueError: pieces would contain attention or a state's mixer, which change from step to
            step.
    """
    support = _support(runner, config.level, limits)
    choice = supported_mode(config.graph_mode(runner.device.type), support)
    mode = choice.mode
    if mode.requires_piecewise_compilation():
        _require_splits_at_mixers(runner, config.splitting_ops)
    sizes = _encoder_sizes(runner, mode, config, limits) if keys is None else ()
    on_demand: list[GraphKey] = []
    if keys is None:
        keys = configured_keys(mode, config, limits)
        if limits.shared_prefix_tokens:
            on_demand = sharing_keys(keys, least_requests=LEAST_SHARING_REQUESTS)
        if limits.num_adapter_slots:
            free, sharing_free = adapter_free_keys(keys), adapter_free_keys(on_demand)
            on_demand = [*free, *on_demand, *sharing_free]
    families = runner.graph_families(pieces)
    if GraphKind.DRAFT in families:
        keys = with_draft_keys(keys)
    encoder_keys = [encoder_key(size) for size in sizes]
    program = None
    if encoder_keys and runner.encoder is not None:
        program = EncoderProgram(runner.encoder.tower, sizes[-1], runner.device)
        families[GraphKind.ENCODER] = WholeGraphs(program, pieces.recorder)
    graphs = GraphSet(
        [*keys, *reversed(encoder_keys)],
        families,
        on_demand=on_demand,
        on_fault=on_fault,
        agree=agree,
    )
    runner.use_graphs(graphs)
    if program is not None and runner.encoder is not None:
        runner.encoder.use_graphs(graphs, program, encoder_keys)
    return PreparedGraphs(choice=choice, graphs=graphs)


def configured_keys(
    mode: CUDAGraphMode, config: CompilationConfig, limits: StepLimits
) -> list[GraphKey]:
    """Returns the graphs of a mode in the configured sizes."""
    return planned_keys(
        mode,
        decode_sizes=config.capture_sizes(limits.max_decodes),
        token_sizes=config.piece_sizes(limits.max_num_batched_tokens),
        max_num_seqs=limits.max_num_seqs,
        decode_q_lens=[1 + length for length in limits.draft_lengths],
    )


def _encoder_sizes(
    runner: ModelRunner, mode: CUDAGraphMode, config: CompilationConfig, limits: StepLimits
) -> tuple[int, ...]:
    """Returns the patches of each graph of the encoder, ascending; none where it runs without.

    Its graphs come with those of steps with prompts, which need it. In batch-invariant mode padding
    would change how products are rounded.
    """
    encoder = runner.encoder
    has_graphs = mode.mixed_mode() is not CUDAGraphMode.NONE
    if encoder is None or not has_graphs or is_batch_invariant():
        return ()
    vision = encoder.tower.config
    return config.encoder_sizes(most_shared_patches(vision, limits), vision.patch_unit)


def install_model(
    runner: ModelRunner,
    compiled: "CompiledModel | None",
    config: CompilationConfig,
    pieces: PieceGraphs,
) -> None:
    """Makes a runner run the compiled model, or the model itself without one.

    A model that was not compiled in pieces is captured around its splitting operators. Copies of
    inputs are made outside the graphs of pieces, which read them.
    """
    forward = runner.forward
    if compiled is not None:
        forward.run_model = compiled.forward
    if compiled is None or not compiled.is_piecewise:
        forward.run_model = pieces.wrap_model(forward.run_model, config.splitting_ops)
    if config.cudagraph_copy_inputs and config.graph_mode(runner.device.type):
        forward.run_model = CopiedInputs(forward.run_model, runner.model_inputs)


@without_other_ranks()
def build_uncaptured_kernels(prepared: PreparedGraphs, limits: StepLimits) -> None:
    """Runs decode steps on a GPU whose kernels no capture builds."""
    if prepared.mode.decode_mode() is CUDAGraphMode.FULL:
        return
    powers = [1 << exponent for exponent in range(limits.max_decodes.bit_length())]
    prepared.graphs.warm_up(
        full_decode_key(size, 1 + length) for length in limits.draft_lengths for size in powers
    )


def warm_up_first_graphs(
    runner: ModelRunner, config: CompilationConfig, *, limits: StepLimits
) -> None:
    """Runs the programs of graphs that are captured before a worker is ready, without graphs.

    Args:
        runner: as for `estimate_graph_bytes`.
        config: the wanted graphs.
        limits: the worker's.
    """
    pieces = piece_graphs(runner.device, runner.model.dtype)
    prepared = prepare_graphs(
        runner, config, limits=limits, pieces=pieces, on_fault=lambda outcome: None
    )
    planned = prepared.graphs.planned
    decodes = [key for key in planned if key.kind is GraphKind.DECODE]
    prepared.graphs.warm_up(decodes[:2])
    others = [key for key in planned if key.kind in (GraphKind.MIXED, GraphKind.PIECEWISE)]
    run_small_steps(runner, limits, (prompts_of(key.num_tokens, limits) for key in others[:2]))
    build_uncaptured_kernels(prepared, limits)


def estimate_graph_bytes(
    runner: ModelRunner, config: CompilationConfig, *, limits: StepLimits
) -> int:
    """Estimates the memory of a model's graphs from the two largest of each kind.

    The second shows the cost of a graph that finds most of its memory in the pool.

    Args:
        runner: of the same model and limits, with any cache; unusable afterwards.
        config: the wanted graphs.
        limits: the worker's.
    """
    pieces = piece_graphs(runner.device, runner.model.dtype)
    install_model(runner, None, config, pieces)
    prepared = prepare_graphs(
        runner, config, limits=limits, pieces=pieces, on_fault=lambda outcome: None
    )
    graphs = prepared.graphs
    total, of_one_more = 0, MIN_GRAPH_BYTES
    for kind in GraphKind:
        keys = [key for key in graphs.planned if key.kind is kind]
        sizes = [graphs.capture(key).num_bytes for key in keys[:2]]
        if sizes:
            added = max(sizes[-1], MIN_GRAPH_BYTES)
            total += sizes[0] + (len(keys) - 1) * added
            if kind is GraphKind.DECODE:
                of_one_more = added
    return total + graphs.most_on_demand * of_one_more


def graph_report(outcome: GraphOutcome) -> GraphReport:
    """Returns a graph's outcome in its wire form."""
    state = GraphState.GRAPH_STATE_CAPTURED
    if outcome.fault:
        state = GraphState.GRAPH_STATE_QUARANTINED
    elif outcome.is_provisional:
        state = GraphState.GRAPH_STATE_PROVISIONAL
    return GraphReport(
        key=wire_key(outcome.key),
        state=state,
        capture_s=outcome.capture_s,
        num_bytes=outcome.num_bytes,
        fault=outcome.fault,
    )


def piece_graphs(device: torch.device, dtype: torch.dtype) -> PieceGraphs:
    """Returns the wrapper of a model's pieces, with the device's recorder."""
    if device.type == "cuda":
        return PieceGraphs(CUDAGraphRecorder(device, dtype))
    return PieceGraphs(ReplayRecorder())


def _require_splits_at_mixers(runner: ModelRunner, splitting_ops: Collection[str]) -> None:
    mixers = {getattr(layer, "splitting_op", None) for layer in runner.model.modules()}
    missing = [each for each in DEFAULT_SPLITTING_OPS if each in mixers - set(splitting_ops)]
    if missing:
        raise ValueError(
            f"splitting_ops is {', '.join(splitting_ops) or 'empty'}; graphs of pieces need "
            f"{' and '.join(missing)} among them, as attention and states cannot be part of one"
        )


def _support(runner: ModelRunner, level: CompilationLevel, limits: StepLimits) -> GraphSupport:
    caches = runner.forward.kv_cache_data
    tokens = [each for each in caches if not isinstance(each, StateCacheData)]
    dtype = next(iter((tokens or caches)[0].tensors().values())).dtype
    attention = min(
        attention_support(each, runner.device, dtype)
        for each in (runner.model, *runner.model.draft_models)
    )
    if runner.forward.sees_later:
        attention = min(attention, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    return graph_support(
        attention,
        level,
        decode_q_len=limits.decode_q_len,
        on_cpu=runner.device.type == "cpu",
    )


def attention_support(
    model: DraftingModel, device: torch.device, cache_dtype: torch.dtype
) -> AttentionCGSupport:
    """Returns the graphs that all layers of a model with a cache support."""
    return min(
        layer.cudagraph_support(device, cache_dtype)
        for layer in model.modules()
        if isinstance(layer, Attention | CacheEntry | LatentAttention | StateMixer)
    )
