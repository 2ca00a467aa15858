"""Counts the captures and replays of a worker's graphs."""

from collections import Counter
from dataclasses import dataclass

import structlog

from protos.engine.v1.worker_pb2 import GraphReport, GraphState, WorkerReady
from services.engine.batch import BatchDescriptor, FallbackReason, GraphKey, GraphKind, StepResult
from services.engine.scheduler.dispatcher import GraphDispatcher

log = structlog.get_logger()

_Name = tuple[GraphKind, int, int, int, bool, bool]
_DRAFT = GraphKind.GRAPH_KIND_DRAFT
_UNORDERED = (_DRAFT, GraphKind.GRAPH_KIND_ENCODER)
"""Graphs that the worker chooses, not the scheduler."""
_ORDER = (
    GraphKind.GRAPH_KIND_DECODE,
    GraphKind.GRAPH_KIND_DRAFT,
    GraphKind.GRAPH_KIND_MIXED,
    GraphKind.GRAPH_KIND_PIECEWISE,
    GraphKind.GRAPH_KIND_ENCODER,
)


@dataclass(slots=True)
class GraphFigures:
    """One graph's cost of capture and the steps that replayed it.

    num_bytes: device memory that it added. padded_tokens: padding in its replays, in query tokens
    or, of the encoder, patches.
    fault: why the graph is not used; empty while it is. is_provisional: steps run it until the
    graph of the compiled model is there.
    """

    key: GraphKey
    capture_s: float = 0.0
    num_bytes: int = 0
    num_replays: int = 0
    padded_tokens: int = 0
    fault: str = ""
    is_provisional: bool = False

    @property
    def is_encoder(self) -> bool:
        """Whether it computes patches of images, not tokens."""
        return self.key.kind == GraphKind.GRAPH_KIND_ENCODER


class GraphLedger:
    """Counts one worker's graphs and keeps its dispatcher up to date."""

    def __init__(self, ready: WorkerReady, *, allows_padding: bool = True) -> None:
        """Starts with the worker's report when it became ready.

        Args:
            ready: the report.
            allows_padding: a graph serves smaller steps too.
        """
        self.mode = ready.cudagraph_mode
        """Name of the worker's CUDAGraphMode."""
        self.mode_reason = ready.cudagraph_mode_reason
        """Why it is not the configured one; empty if it is."""
        self.num_planned = len(ready.planned_graphs)
        """Graphs that are or will be captured, those of steps that share prefixes or have no
        adapters once some miss them."""
        self.pass_matches = dict(ready.compiled.pass_matches)
        """Matches of each compiler pass in the worker's model, by name."""
        self.dispatcher = GraphDispatcher(
            planned=[key for key in ready.planned_graphs if key.kind not in _UNORDERED],
            without_graphs=ready.no_graphs_reason or FallbackReason.FALLBACK_REASON_UNSUPPORTED,
            allows_padding=allows_padding,
        )
        self._figures: dict[_Name, GraphFigures] = {}
        self._is_complete = not self.num_planned
        for report in ready.graphs:
            self.take(report)

    @property
    def figures(self) -> list[GraphFigures]:
        """Every planned graph that was captured or given up: decodes first, larger first."""
        return sorted(
            (each for each in self._figures.values() if not each.is_provisional),
            key=lambda each: (_ORDER.index(each.key.kind), -each.key.num_tokens),
        )

    @property
    def captured(self) -> list[GraphFigures]:
        """The graphs that steps may order for good."""
        return [each for each in self.figures if not each.fault and each.key.kind not in _UNORDERED]

    def costs(self, *kinds: GraphKind) -> dict[int, int]:
        """Returns the bytes of each captured graph of these kinds, by tokens."""
        costs = Counter[int]()
        for each in self.captured:
            if each.key.kind in kinds and not _is_on_demand(each.key):
                costs[each.key.num_tokens] += each.num_bytes
        return costs

    def take(self, report: GraphReport) -> None:
        """Takes the worker's report on one graph; the dispatcher uses it from the next step on."""
        self._book(report)
        figures = self.figures
        if len(figures) == self.num_planned and not self._is_complete:
            self._is_complete = True
            captured = [each for each in figures if not each.fault]
            log.info(
                "graphs_complete",
                num_captured=len(captured),
                num_planned=self.num_planned,
                capture_s=round(sum(each.capture_s for each in captured), 3),
                total_mb=sum(each.num_bytes for each in captured) // 2**20,
            )

    def _book(self, report: GraphReport) -> None:
        name = _name(report.key)
        if _is_on_demand(report.key) and name not in self._figures:
            self.num_planned += 1
        figures = self._figures.setdefault(name, GraphFigures(report.key))
        figures.is_provisional = report.state == GraphState.GRAPH_STATE_PROVISIONAL
        if report.state != GraphState.GRAPH_STATE_QUARANTINED:
            figures.capture_s = report.capture_s
            figures.num_bytes = report.num_bytes
            if report.key.kind not in _UNORDERED:
                self.dispatcher.capture(report.key)
            return
        figures.fault = report.fault
        if report.key.kind not in _UNORDERED:
            self.dispatcher.quarantine(report.key)
        log.warning("graph_was_given_up", num_tokens=report.key.num_tokens, fault=report.fault)

    def count(self, descriptor: BatchDescriptor, result: StepResult) -> FallbackReason:
        """Counts a step that ran; returns why it ran without a graph, if it did."""
        self.count_encoder(result)
        if descriptor.fallback_reason:
            return descriptor.fallback_reason
        if result.fallback_reason:
            return result.fallback_reason
        self._count_replay(_name(descriptor.graph_key), descriptor)
        if result.drafted_by_graph:
            self._count_replay(_draft_name(descriptor.graph_key), descriptor)
        return FallbackReason.FALLBACK_REASON_UNSPECIFIED

    def count_encoder(self, result: StepResult) -> None:
        """Counts the encoder's graph, if one ran in a step of one data-parallel rank."""
        run = result.encoder_run
        if run.HasField("graph_key"):
            figures = self._figures[_name(run.graph_key)]
            figures.num_replays += 1
            figures.padded_tokens += figures.key.num_tokens - run.num_patches

    def _count_replay(self, name: _Name, descriptor: BatchDescriptor) -> None:
        figures = self._figures[name]
        figures.num_replays += 1
        figures.padded_tokens += figures.key.num_tokens - descriptor.context.num_tokens


def _name(key: GraphKey) -> _Name:
    """Returns a hashable key of a graph."""
    sizes = key.num_tokens, key.graph_bs, key.max_q_len
    return key.kind, *sizes, key.shares_prefixes, key.skips_adapters


def _draft_name(key: GraphKey) -> _Name:
    """Returns the key of the draft graph after one of decodes, the same for all its forms."""
    return _DRAFT, key.num_tokens, key.graph_bs, key.max_q_len, False, False


def _is_on_demand(key: GraphKey) -> bool:
    """Whether a graph is captured once steps miss it."""
    return key.shares_prefixes or key.skips_adapters
