"""`octavo graphs plan`: compares today's capture sizes with the best for the observed steps."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from models.cudagraph_mode import CUDAGraphMode
from protos.engine.v1.engine_pb2 import GetStatsResponse
from services.engine.batch import GraphKind
from services.engine.capture_sizes.choice import MIN_STEPS
from services.engine.capture_sizes.history import StepHistory, read_history
from services.engine.capture_sizes.planner import Fit, GraphMemory, plan_sizes, plan_within
from services.engine.config.compilation import CompilationConfig

_MIB = 2**20
_NOT_OF_STEPS = (GraphKind.GRAPH_KIND_DRAFT, GraphKind.GRAPH_KIND_ENCODER)
_FLAGS = {"decodes": "--cudagraph-capture-sizes", "pieces": "--cudagraph-piece-sizes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPlan:
    """One kind of graph: its steps, present sizes and planned sizes."""

    name: str
    counts: Mapping[int, int]
    today: Fit
    planned: Fit

    @property
    def arguments(self) -> str:
        """The flag for the planned sizes."""
        return f"{_FLAGS[self.name]} {','.join(map(str, self.planned.sizes))}"


def plan_graphs(arguments: Sequence[str]) -> int:
    """Prints a plan; returns the process's exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.histogram is None:
            history = _history_of(GetStatsResponse.FromString(sys.stdin.buffer.read()))
        else:
            history = read_history(options.histogram)
        plans = make_plans(history, num_graphs=options.num_graphs, memory_mb=options.memory_mb)
    except (OSError, ValueError) as error:
        print(f"octavo: {error}", file=sys.stderr)  # noqa: T201  a tool's answer
        return 1
    answer = _json(plans) if options.json else "\n".join(_report(history, plans))
    print(answer)  # noqa: T201  a tool's answer
    return 0


def make_plans(
    history: StepHistory, *, num_graphs: int | None = None, memory_mb: float | None = None
) -> list[KindPlan]:
    """Returns a plan for each kind of graph that the observed steps could use.

    Args:
        history: the steps, and the present graphs.
        num_graphs: most graphs of each kind; by default as many as at present or, without any, as
            an engine without flags captures.
        memory_mb: most MiB for the graphs of each kind; leaves out kinds without measured memory.

    Raises:
        ValueError: there is nothing to plan from.
    """
    # An engine without pieces may gain by them, so they are planned as well.
    mode = history.mode if history.mode.mixed_mode() else CUDAGraphMode.FULL_AND_PIECEWISE
    decodes, pieces = history.by_graph_kind(mode)
    if not decodes and not pieces:
        raise ValueError("no step was seen yet, so there is nothing to plan from")
    plans = []
    for name, counts, costs, limit in (
        ("decodes", decodes, history.decode_graphs, history.max_decode_size),
        ("pieces", pieces, history.piece_graphs, history.max_num_batched_tokens),
    ):
        if not counts:
            continue
        memory = GraphMemory.from_measured(costs)
        usual = sorted(costs) or CompilationConfig().capture_sizes(limit)
        if memory_mb is None:
            most = len(usual) if num_graphs is None else num_graphs
            sizes = plan_sizes(counts, num_graphs=most, reach=usual[-1])
        elif memory is not None:
            budget = int(memory_mb * _MIB)
            sizes = plan_within(counts, num_bytes=budget, memory=memory, reach=usual[-1])
        else:
            continue
        planned_bytes = None
        if memory is not None:
            planned_bytes = memory.of(largest=max(sizes, default=0), num_graphs=len(sizes))
        today = Fit.of(counts, sorted(costs), num_bytes=sum(costs.values()) or None)
        planned = Fit.of(counts, sizes, num_bytes=planned_bytes)
        plans.append(KindPlan(name=name, counts=counts, today=today, planned=planned))
    if not plans:
        raise ValueError("no graph's memory was measured here, so none can be planned by it")
    return plans


def _history_of(stats: GetStatsResponse) -> StepHistory:
    decode_graphs, piece_graphs = Counter[int](), Counter[int]()
    for graph in stats.graphs:
        is_on_demand = graph.shares_prefixes or graph.skips_adapters
        is_of_steps = graph.kind not in _NOT_OF_STEPS and not is_on_demand
        if graph.captured and is_of_steps:
            is_decode = graph.kind == GraphKind.GRAPH_KIND_DECODE
            costs = decode_graphs if is_decode else piece_graphs
            costs[graph.num_tokens] += graph.num_bytes
    return StepHistory(
        max_num_seqs=stats.decode_coverage.limit,
        max_num_batched_tokens=stats.other_coverage.limit,
        decodes=dict(stats.decode_steps),
        others=dict(stats.other_steps),
        cudagraph_mode=stats.cudagraph_mode or CUDAGraphMode.NONE.name,
        decode_graphs=decode_graphs,
        piece_graphs=piece_graphs,
    )


def _json(plans: Sequence[KindPlan]) -> str:
    """Formats plans as one line of JSON."""
    names = ("sizes", "hit_rate", "padding", "num_bytes")
    return json.dumps(
        {
            plan.name: {
                "num_steps": plan.today.num_steps,
                "today": {name: getattr(plan.today, name) for name in names},
                "planned": {name: getattr(plan.planned, name) for name in names},
            }
            for plan in plans
        }
    )


def _report(history: StepHistory, plans: Sequence[KindPlan]) -> Iterator[str]:
    """Yields lines that describe plans."""
    mode = history.mode
    yield f"graphs today: {mode}"
    for plan in plans:
        num_steps = plan.today.num_steps
        kind, unit = "steps of decodes", "requests"
        if plan.name == "pieces":
            is_all = mode.decode_mode() is CUDAGraphMode.PIECEWISE
            kind, unit = ("all steps" if is_all else "other steps"), "tokens"
        few = "" if num_steps >= MIN_STEPS else f"; auto wants {MIN_STEPS:,}"
        sizes = f"{min(plan.counts)} to {max(plan.counts)}"
        yield f"\n{kind}: {num_steps:,} seen, of {sizes} {unit}{few}"
        yield "           graphs   hit rate    padding      memory  sizes"
        for name, each in (("today", plan.today), ("planned", plan.planned)):
            padding = f"{each.padding:.1%}" if each.num_hits else "-"
            memory = "-" if each.num_bytes is None else f"{each.num_bytes / _MIB:.1f} MiB"
            sizes = " ".join(map(str, each.sizes)) or "none"
            figures = f"{len(each.sizes):7}{each.hit_rate:11.1%}{padding:>11}{memory:>12}"
            yield f"  {name:8}{figures}  {sizes}"
    if wanted := [plan.arguments for plan in plans if plan.planned.sizes]:
        yield "\nflags for these sizes:"
        yield " ".join(wanted)
    captures = {"decodes": mode.decode_mode(), "pieces": mode.mixed_mode()}
    if not all(captures[plan.name] for plan in plans):
        lacking = "graphs of steps with prompts" if mode else "graphs"
        yield f"{lacking} need --cudagraph-mode full, and any --compilation-level but 1"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo graphs plan",
        description="Proposes capture sizes for the steps that were seen.",
    )
    parser.add_argument(
        "--histogram",
        type=Path,
        help="a file of the engine's histogram folder; else a GetStatsResponse is read from stdin",
    )
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--num-graphs", type=int, help="most graphs of each kind, at least 1")
    bound.add_argument("--memory-mb", type=float, help="most MiB for the graphs of each kind")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser
