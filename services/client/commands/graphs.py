"""`octavo graphs`: which graphs the engine captured, and what they are good for."""

import json
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from protos.engine.v1 import engine_pb2
from protos.engine.v1.batch_pb2 import GraphKind
from services.client.channel import Tls
from services.client.commands.stats import Stats, states_line, stats_of
from services.client.console import TerminalConsole, echo
from services.client.flags import DEFAULT_ENGINE, EngineAddress

NONE_RAN = "-"
_KINDS = {
    GraphKind.GRAPH_KIND_DECODE: ("decode", "decodes"),
    GraphKind.GRAPH_KIND_MIXED: ("prompts", "tokens with prompts"),
    GraphKind.GRAPH_KIND_PIECEWISE: ("pieces", "tokens in pieces"),
    GraphKind.GRAPH_KIND_DRAFT: ("drafts", "tokens' drafts"),
    GraphKind.GRAPH_KIND_ENCODER: ("encoder", "patches"),
}


def graphs(
    context: typer.Context,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one line of JSON.")
    ] = False,
    engine: EngineAddress = DEFAULT_ENGINE,
    tls: Tls,
) -> None:
    """Shows the captured graphs: what they cost, how often they run, how much is padding.

    Examples:
    - `octavo graphs`

    - `octavo graphs --json | jq .graphs`

    - `octavo graphs plan`
    """
    if context.invoked_subcommand is not None:
        return
    stats = stats_of(engine, tls)
    if as_json:
        echo(json.dumps(_figures(stats)))
    else:
        TerminalConsole().print(report(engine, stats))


def report(address: str, stats: Stats) -> Group:
    """Returns the summary, the table of graphs and the steps that ran without one."""
    parts: list[Text | Table] = [_summary(address, stats)]
    if stats.graphs:
        parts.append(_table(stats))
    if stats.num_graphs_planned:
        parts.append(Text(_coverage(stats)))
    if states := states_line(stats):
        parts.append(Text(f"states: {states}"))
    if stats.pass_matches:
        parts.append(Text(f"compiler passes: {_matches(stats)}"))
    misses = {name: count for name, count in stats.graph_dispatch.items() if name != "graph"}
    if misses:
        listed = ", ".join(f"{count} {name}" for name, count in sorted(misses.items()))
        parts.append(Text(f"steps without a graph: {listed}"))
    parts += [
        Text(f"{_label(graph)} is not used: {graph.fault}", style="red")
        for graph in stats.graphs
        if graph.fault
    ]
    return Group(*parts)


def _summary(address: str, stats: Stats) -> Text:
    num_captured = sum(graph.captured for graph in stats.graphs)
    summary = Text(f"engine {address}: {stats.cudagraph_mode or 'not ready'}", style="bold")
    if stats.cudagraph_mode_reason:
        summary.append(f"\n{stats.cudagraph_mode_reason}", style="not bold")
    summary.append(f"\n{num_captured}/{stats.num_graphs_planned} graphs", style="not bold")
    if stats.graphs:
        capture_s = sum(graph.capture_s for graph in stats.graphs)
        num_bytes = sum(graph.num_bytes for graph in stats.graphs)
        summary.append(
            f", captured in {capture_s:.1f} s, {num_bytes / 2**20:.0f} MiB", style="not bold"
        )
    if stats.num_steps:
        hits = stats.graph_dispatch.get("graph", 0)
        summary.append(
            f"; hit rate {hits / stats.num_steps:.1%} of {stats.num_steps} steps",
            style="not bold",
        )
        padded, computed = _tokens(stats)
        if computed:
            summary.append(f", padding {padded / computed:.1%}", style="not bold")
    return summary


def _coverage(stats: Stats) -> str:
    """Says how large steps may get before they run without a graph."""
    decodes, others = stats.decode_coverage, stats.other_coverage
    parts = [
        f"{kind} up to {min(coverage.sizes[-1], coverage.limit)} of {coverage.limit}{unit}"
        if coverage.sizes
        else f"no {kind}"
        for kind, unit, coverage in (("decodes", "", decodes), ("other steps", " tokens", others))
    ]
    return f"covers {parts[0]}, {parts[1]}"


def _matches(stats: Stats) -> str:
    """Lists the matches of each compiler pass."""
    return ", ".join(f"{name} {count}" for name, count in sorted(stats.pass_matches.items()))


def _table(stats: Stats) -> Table:
    table = Table()
    table.add_column("graph")
    for name in ("tokens", "capture", "memory", "steps", "of all", "padding"):
        table.add_column(name, justify="right")
    for graph in stats.graphs:
        computed = graph.num_replays * graph.num_tokens
        share = graph.num_replays / stats.num_steps if stats.num_steps else 0.0
        table.add_row(
            _name(graph),
            str(graph.num_tokens),
            f"{graph.capture_s * 1000:.0f} ms",
            f"{graph.num_bytes / 2**20:.1f} MiB",
            str(graph.num_replays) if graph.captured else "given up",
            f"{share:.1%}" if graph.num_replays else NONE_RAN,
            f"{graph.padded_tokens / computed:.1%}" if computed else NONE_RAN,
            style=None if graph.captured else "red",
        )
    return table


def _tokens(stats: Stats) -> tuple[int, int]:
    """Returns the query tokens that graphs computed for nothing, and all that they computed."""
    graphs = [each for each in stats.graphs if each.kind != GraphKind.GRAPH_KIND_ENCODER]
    padded = sum(graph.padded_tokens for graph in graphs)
    return padded, sum(graph.num_replays * graph.num_tokens for graph in graphs)


def _name(graph: engine_pb2.GraphStats) -> str:
    name, _ = _words(graph)
    if graph.kind == GraphKind.GRAPH_KIND_MIXED:
        name = f"{name} of {graph.graph_bs}"
    name = f"{name}, shared" if graph.shares_prefixes else name
    return f"{name}, no adapters" if graph.skips_adapters else name


def _label(graph: engine_pb2.GraphStats) -> str:
    shared = " that share prefixes" if graph.shares_prefixes else ""
    skips = " without adapters" if graph.skips_adapters else ""
    return f"the graph of {graph.num_tokens} {_words(graph)[1]}{shared}{skips}"


def _words(graph: engine_pb2.GraphStats) -> tuple[str, str]:
    """Returns the name of a graph's kind, and what such a graph computes."""
    return _KINDS.get(graph.kind, ("unknown", "tokens"))


def _figures(stats: Stats) -> dict[str, object]:
    padded, computed = _tokens(stats)
    hits = stats.graph_dispatch.get("graph", 0)
    return {
        "cudagraph_mode": stats.cudagraph_mode,
        "cudagraph_mode_reason": stats.cudagraph_mode_reason,
        "num_planned": stats.num_graphs_planned,
        "num_captured": sum(graph.captured for graph in stats.graphs),
        "hit_rate": hits / stats.num_steps if stats.num_steps else 0.0,
        "padding": padded / computed if computed else 0.0,
        "steps": dict(stats.graph_dispatch),
        "passes": dict(stats.pass_matches),
        "coverage": {
            name: {
                "sizes": list(coverage.sizes),
                "limit": coverage.limit,
                "max_padding": coverage.max_padding,
            }
            for name, coverage in (
                ("decodes", stats.decode_coverage),
                ("others", stats.other_coverage),
            )
        },
        "graphs": [
            {field.name: getattr(graph, field.name) for field in graph.DESCRIPTOR.fields}
            | {"kind": _words(graph)[0]}
            for graph in stats.graphs
        ],
    }
