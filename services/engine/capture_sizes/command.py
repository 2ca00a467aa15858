"""`octavo graphs plan`: today's capture sizes beside the best ones for the steps that were seen."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from models.cudagraph_mode import CUDAGraphMode
from protos.engine.v1.engine_pb2 import GetStatsResponse
from services.engine.capture_sizes.choice import MIN_STEPS
from services.engine.capture_sizes.history import GraphCost, StepHistory, read_history
from services.engine.capture_sizes.planner import Fit, GraphMemory, fit, plan_sizes, plan_within
from services.engine.compilation_config import CompilationConfig

USAGE_ERROR = 2
UNKNOWN = "-"
_MIB = 2**20


class PlanError(Exception):
    """No plan can be made of what is known; the message is for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A set of capture sizes and what comes of it. num_bytes is None where nothing was measured."""

    sizes: Sequence[int]
    fit: Fit
    num_bytes: int | None

    def figures(self) -> dict[str, Any]:
        """Returns them for programs."""
        return {
            "sizes": list(self.sizes),
            "hit_rate": self.fit.hit_rate,
            "padding": self.fit.padding,
            "num_bytes": self.num_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPlan:
    """One kind of graph: the steps that it is for, its sizes today and the ones proposed."""

    name: str
    counts: Mapping[int, int]
    today: Sizes
    planned: Sizes

    def figures(self) -> dict[str, Any]:
        """Returns the plan for programs."""
        return {
            "num_steps": self.today.fit.num_steps,
            "today": self.today.figures(),
            "planned": self.planned.figures(),
        }

    @property
    def arguments(self) -> str:
        """The flag that asks for the proposed sizes."""
        flag = "cudagraph-capture-sizes" if self.name == "decodes" else "cudagraph-piece-sizes"
        return f"--{flag} {','.join(str(size) for size in self.planned.sizes)}"


def plan_graphs(arguments: Sequence[str]) -> int:
    """Prints a plan; returns the process's exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.histogram is None:
            history = _history_of(GetStatsResponse.FromString(sys.stdin.buffer.read()))
        else:
            history = read_history(options.histogram)
        plans = make_plans(history, num_graphs=options.num_graphs, memory_mb=options.memory_mb)
    except (OSError, ValueError, PlanError) as error:
        print(f"octavo: {error}", file=sys.stderr)  # noqa: T201  a tool's answer
        return 1
    if options.json:
        figures = {plan.name: plan.figures() for plan in plans}
        print(json.dumps(figures))  # noqa: T201  a tool's answer
    else:
        Console().print(_report(history, plans))
    return 0


def make_plans(
    history: StepHistory, *, num_graphs: int | None = None, memory_mb: float | None = None
) -> list[KindPlan]:
    """Returns a plan for each kind of graph that the steps seen could use.

    Args:
        history: the steps, and the graphs of today.
        num_graphs: most graphs of each kind; as many as today when neither this nor the next is
            given, or as the pattern has where nothing is captured today.
        memory_mb: most MiB that the graphs of each kind may take; kinds without a graph whose
            memory was measured are left out then.

    Raises:
        PlanError: there is nothing to plan from.
    """
    # What an engine without pieces would gain by them is worth knowing too.
    mode = history.mode
    if not mode.mixed_mode():
        mode = CUDAGraphMode.FULL_AND_PIECEWISE
    decodes, pieces = history.histogram.by_graph_kind(mode)
    kinds = (
        _Kind("decodes", decodes, history.max_decode_size, history.costs(uniform=True)),
        _Kind("pieces", pieces, history.max_num_batched_tokens, history.costs(uniform=False)),
    )
    seen = [kind for kind in kinds if kind.counts]
    if not seen:
        raise PlanError("no step was seen yet, so there is nothing to plan from")
    if memory_mb is None:
        return [
            _finish(
                kind,
                plan_sizes(
                    kind.counts, num_graphs=num_graphs or len(kind.usual), reach=kind.usual[-1]
                ),
            )
            for kind in seen
        ]
    num_bytes = int(memory_mb * _MIB)
    plans = [
        _finish(
            kind,
            plan_within(kind.counts, num_bytes=num_bytes, memory=kind.memory, reach=kind.usual[-1]),
        )
        for kind in seen
        if kind.memory is not None
    ]
    if not plans:
        raise PlanError("no graph's memory was measured here, so none can be planned by it")
    return plans


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one kind of graph is planned from. costs: bytes of each graph of today, by size."""

    name: str
    counts: Mapping[int, int]
    limit: int
    costs: Mapping[int, int]

    @property
    def usual(self) -> Sequence[int]:
        """The sizes of today, or those that an engine without flags would capture."""
        return sorted(self.costs) or CompilationConfig().capture_sizes(self.limit)

    @property
    def memory(self) -> GraphMemory | None:
        """What graphs of this kind take, if any was measured."""
        return GraphMemory.from_measured(self.costs)


def _finish(kind: _Kind, planned: Sequence[int]) -> KindPlan:
    """Puts planned sizes beside those of today."""
    today = sorted(kind.costs)
    return KindPlan(
        name=kind.name,
        counts=kind.counts,
        today=Sizes(
            sizes=today,
            fit=fit(kind.counts, today),
            num_bytes=sum(kind.costs.values()) if kind.memory else None,
        ),
        planned=Sizes(
            sizes=planned,
            fit=fit(kind.counts, planned),
            num_bytes=_memory(kind.memory, planned),
        ),
    )


def _memory(memory: GraphMemory | None, sizes: Sequence[int]) -> int | None:
    if memory is None:
        return None
    return memory.of(largest=max(sizes, default=0), num_graphs=len(sizes))


def _history_of(stats: GetStatsResponse) -> StepHistory:
    """Returns what an engine tells of its steps and graphs."""
    return StepHistory(
        max_num_seqs=stats.decode_coverage.limit,
        max_num_batched_tokens=stats.other_coverage.limit,
        cudagraph_mode=stats.cudagraph_mode or CUDAGraphMode.NONE.name,
        decodes=dict(stats.decode_steps),
        others=dict(stats.other_steps),
        graphs=tuple(
            GraphCost(
                uniform=graph.uniform,
                num_tokens=graph.num_tokens,
                num_bytes=graph.num_bytes,
                capture_s=graph.capture_s,
            )
            for graph in stats.graphs
            if graph.captured and not graph.is_draft
        ),
    )


def _report(history: StepHistory, plans: Sequence[KindPlan]) -> Group:
    parts: list[Text | Table] = [Text(f"graphs today: {history.cudagraph_mode}", style="bold")]
    for plan in plans:
        parts += [Text(_heading(history, plan)), _table(plan)]
    wanted = [plan.arguments for plan in plans if plan.planned.sizes]
    if wanted:
        parts.append(Text("flags for these sizes:", style="bold"))
        # Unbroken, so that it can be copied.
        parts.append(Text(" ".join(wanted), no_wrap=True, overflow="ignore"))
    if not all(_captures(history, plan) for plan in plans):
        lacking = "graphs of steps with prompts" if history.mode else "graphs"
        advice = f"{lacking} need --cudagraph-mode full, and any --compilation-level but 1"
        parts.append(Text(advice, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _captures(history: StepHistory, plan: KindPlan) -> bool:
    """Whether the engine captures graphs of a plan's kind."""
    return bool(history.mode.decode_mode() if plan.name == "decodes" else history.mode.mixed_mode())


def _heading(history: StepHistory, plan: KindPlan) -> str:
    seen = f"{plan.today.fit.num_steps:,}"
    sizes = f"{min(plan.counts)} to {max(plan.counts)}"
    few = "" if plan.today.fit.num_steps >= MIN_STEPS else f"; auto wants {MIN_STEPS:,}"
    if plan.name == "decodes":
        return f"\nsteps of decodes: {seen} seen, of {sizes} requests{few}"
    steps = "all steps" if history.mode.decode_mode() is CUDAGraphMode.PIECEWISE else "other steps"
    return f"\n{steps}: {seen} seen, of {sizes} tokens{few}"


def _table(plan: KindPlan) -> Table:
    table = Table()
    table.add_column("")
    for name in ("graphs", "hit rate", "padding", "memory"):
        table.add_column(name, justify="right")
    table.add_column("sizes", overflow="fold")
    for name, sizes in (("today", plan.today), ("planned", plan.planned)):
        num_bytes = sizes.num_bytes
        table.add_row(
            name,
            str(len(sizes.sizes)),
            f"{sizes.fit.hit_rate:.1%}",
            f"{sizes.fit.padding:.1%}" if sizes.fit.num_hits else UNKNOWN,
            UNKNOWN if num_bytes is None else f"{num_bytes / _MIB:.1f} MiB",
            " ".join(str(size) for size in sizes.sizes) or "none",
        )
    return table


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
    bound.add_argument("--num-graphs", type=_at_least_1, help="most graphs of each kind")
    bound.add_argument("--memory-mb", type=float, help="most MiB for the graphs of each kind")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser


def _at_least_1(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
