"""Prepares a worker's graphs: which to capture, with what, and how the service hears of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import GraphKey
from models.layers.decoder import CausalLM
from models.ops.cudagraph_support import AttentionCGSupport, attention_cudagraph_support
from protos.engine.v1.worker_pb2 import GraphReport, GraphState
from services.engine import batch
from services.engine.compilation.graphs.capture_plan import (
    GraphSupport,
    planned_keys,
    supported_mode,
)
from services.engine.compilation.graphs.cuda_recorder import CUDAGraphRecorder
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.compilation.graphs.piece_wrapper import PieceGraphs
from services.engine.compilation.graphs.replay_recorder import ReplayRecorder
from services.engine.compilation_config import CompilationConfig
from services.engine.worker.decode_graphs import DecodeGraphs, hidden_buffer
from services.engine.worker.model_runner import ModelRunner
from services.engine.worker.step_arrays import StepLimits
from services.engine.worker.step_pieces import StepPieces
from services.engine.worker.worker_graphs import WorkerGraphs

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedGraphs:
    """The graphs to capture, none of them captured yet."""

    mode: CUDAGraphMode
    graphs: WorkerGraphs

    def capture_all(self, report_progress: Callable[[str], None]) -> list[GraphOutcome]:
        """Captures all planned graphs, large ones first: the small ones then reuse their memory."""
        outcomes: list[GraphOutcome] = []
        num_planned = len(self.graphs.planned)
        while self.graphs.num_pending:
            outcomes.append(self.graphs.capture_next())
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
        """Returns why steps run without graphs when none is planned."""
        if self.graphs.planned:
            return batch.FallbackReason.FALLBACK_REASON_UNSPECIFIED
        if enforce_eager:
            return batch.FallbackReason.FALLBACK_REASON_ENFORCE_EAGER
        return batch.FallbackReason.FALLBACK_REASON_UNSUPPORTED


def prepare_graphs(
    runner: ModelRunner,
    model: CausalLM,
    config: CompilationConfig,
    *,
    limits: StepLimits,
    pieces: PieceGraphs,
    on_fault: Callable[[GraphOutcome], None],
) -> PreparedGraphs:
    """Plans a runner's graphs and lets it use them as they are captured.

    Args:
        runner: the worker's.
        model: its model.
        config: what was asked for.
        limits: the worker's.
        pieces: those that the compiler made of the model, if any; its recorder records all graphs.
        on_fault: hears of a graph that is given up while serving.
    """
    weight = model.lm_head.weight
    device = weight.device
    mode = supported_mode(config.cudagraph_mode, _support(device, has_pieces=len(pieces) > 0))
    keys = planned_keys(
        mode,
        decode_sizes=config.capture_sizes(min(limits.max_num_seqs, limits.max_num_batched_tokens)),
        token_sizes=config.capture_sizes(limits.max_num_batched_tokens),
    )
    largest_bs = max((key.graph_bs for key in keys if key.uniform), default=0)
    decodes = DecodeGraphs(
        runner.forward,
        runner.buffers,
        pieces.recorder,
        limits=limits,
        hidden=hidden_buffer(
            largest_bs, model.config.hidden_size, dtype=weight.dtype, device=device
        ),
    )
    graphs = WorkerGraphs(
        keys,
        decodes,
        pieces=StepPieces(runner.forward, runner.buffers, pieces, limits=limits),
        on_fault=on_fault,
    )
    runner.use_graphs(graphs)
    return PreparedGraphs(mode=mode, graphs=graphs)


def graph_report(outcome: GraphOutcome) -> GraphReport:
    """Returns what became of a graph, as it travels."""
    state = GraphState.GRAPH_STATE_QUARANTINED if outcome.fault else GraphState.GRAPH_STATE_CAPTURED
    return GraphReport(
        key=_wire_key(outcome.key),
        state=state,
        capture_s=outcome.capture_s,
        num_bytes=outcome.num_bytes,
        fault=outcome.fault,
    )


def wire_keys(keys: Iterable[GraphKey]) -> list[batch.GraphKey]:
    """Returns names of graphs as they travel."""
    return [_wire_key(key) for key in keys]


def _wire_key(key: GraphKey) -> batch.GraphKey:
    return batch.GraphKey(
        num_tokens=key.num_tokens,
        graph_bs=key.graph_bs,
        max_q_len=key.max_q_len,
        uniform=key.uniform,
    )


def piece_graphs(device: torch.device) -> PieceGraphs:
    """Returns what wraps a model's pieces while it is compiled, with the device's recorder."""
    if device.type == "cuda":
        return PieceGraphs(CUDAGraphRecorder(device))
    return PieceGraphs(ReplayRecorder())


def _support(device: torch.device, *, has_pieces: bool) -> GraphSupport:
    """Returns what can be captured; a CPU rehearses it, with attention over full block tables."""
    support = attention_cudagraph_support(device)
    can_decode = support >= AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return GraphSupport(full_decode=can_decode or device.type == "cpu", pieces=has_pieces)
