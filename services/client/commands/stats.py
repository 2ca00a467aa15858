"""`octavo stats`: what the engine is doing."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from google.protobuf.message import Message
from rich.live import Live
from rich.table import Table

from protos.engine.v1 import engine_pb2
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.engine.v1.worker_pb2 import RankInfo
from services.client.calls import ask, connected
from services.client.channel import Tls
from services.client.console import TerminalConsole, echo
from services.client.flags import DEFAULT_ENGINE, EngineAddress

CALL_TIMEOUT_S = 5.0
Stats = engine_pb2.GetStatsResponse
_GRAPH_FIELDS = {"graphs", "decode_coverage", "other_coverage", "decode_steps", "other_steps"}
"""Told by `octavo graphs --json` and `octavo graphs plan --json`."""


def stats(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once and leave.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures once, as one line of JSON.")
    ] = False,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    engine: EngineAddress = DEFAULT_ENGINE,
    tls: Tls,
) -> None:
    """Shows the engine's requests, KV cache and rates, live until Ctrl-C.

    Where standard output is no terminal, the table is printed once.

    Examples:
    - `octavo stats`

    - `octavo stats --json >> stats.jsonl`
    """
    with suppress(KeyboardInterrupt):
        if as_json:
            echo(json.dumps(_figures(stats_of(engine, tls))))
        elif once or not sys.stdout.isatty():
            TerminalConsole().print(_table(engine, stats_of(engine, tls)))
        else:
            asyncio.run(_show_live(engine, tls, interval_s))


def stats_of(address: str, tls: Tls, *, include_step_sizes: bool = False) -> Stats:
    """Returns an engine's figures now."""
    answer: Stats = ask(
        EngineServiceStub,
        address,
        tls,
        lambda stub: read_stats(stub, include_step_sizes=include_step_sizes),
    )
    return answer


async def read_stats(stub: Any, *, include_step_sizes: bool = False) -> Stats:
    """Returns the figures of the engine that a stub calls."""
    request = engine_pb2.GetStatsRequest(
        include_step_sizes=include_step_sizes, include_experts=True
    )
    answer: Stats = await stub.GetStats(request, timeout=CALL_TIMEOUT_S)
    return answer


def _figures(stats: Stats) -> dict[str, object]:
    fields = [field.name for field in stats.DESCRIPTOR.fields if field.name not in _GRAPH_FIELDS]
    return {name: _plain(getattr(stats, name)) for name in fields}


async def _show_live(address: str, tls: Tls, interval_s: float) -> None:
    before = None
    async with connected(EngineServiceStub, address, tls) as stub:
        with Live(console=TerminalConsole(), auto_refresh=False) as live:
            while True:
                stats = await read_stats(stub)
                live.update(_table(address, stats, before), refresh=True)
                before = stats
                await asyncio.sleep(interval_s)


def states_line(stats: Stats) -> str:
    """Returns a line on states, of a model whose layers keep some; else nothing."""
    size = stats.num_state_blocks
    if not size:
        return ""
    return (
        f"{size} blocks or {stats.state_bytes / 2**20:.3g} MiB each, "
        f"{(stats.num_blocks - 1) // size} at most, {stats.num_running} live; "
        f"{stats.num_snapshots} snapshots kept, {stats.num_snapshots_made} made, "
        f"{stats.num_snapshots_used} used; {stats.num_recomputed_tokens} tokens computed again"
    )


def _images(stats: Stats) -> dict[str, str]:
    """Returns a line on images, once there were some."""
    encoded, found = stats.num_encoded_images, stats.num_found_images
    if not encoded:
        return {}
    runs = ", ".join(f"{count} {run}" for run, count in sorted(stats.images_by_run.items()))
    return {"images": f"{encoded} encoded ({runs}), {found} found encoded"}


def _adapters(stats: Stats) -> dict[str, str]:
    """Returns a line on adapters, of an engine with room for some."""
    if not stats.HasField("adapters"):
        return {}
    adapters = stats.adapters
    running = ", ".join(f"{n} {name}" for name, n in sorted(adapters.num_running.items()))
    return {
        "adapters": f"{adapters.num_known} known, {adapters.num_resident} of "
        f"{adapters.num_slots} slots in use; {adapters.num_slot_loads} loads, "
        f"{adapters.num_evictions} evictions, {adapters.num_waiting_for_slot} requests without a "
        f"slot; running: {running or 'none'}"
    }


def _table(address: str, stats: Stats, before: Stats | None = None) -> Table:
    table = Table(title=f"engine {address}", show_header=False)
    used = stats.num_blocks - stats.num_free_blocks
    share = used / stats.num_blocks if stats.num_blocks else 0.0
    steps = max(stats.num_steps, 1)
    cached_share = stats.cached_tokens / max(stats.prompt_tokens, 1)
    rows = {
        "state": _state(stats),
        **({"weights": stats.weights_version} if stats.weights_version else {}),
        "requests": f"{stats.num_running} running, {stats.num_waiting} waiting, "
        f"{stats.num_sessions} sessions",
        "KV blocks": f"{_bar(share)} {share:.0%} of {stats.num_blocks} in use, "
        f"{stats.num_cached_blocks} free ones cached",
        **({"states": states} if (states := states_line(stats)) else {}),
        **_images(stats),
        **_adapters(stats),
        "now": _rates(stats, before),
        "so far": f"{stats.output_tokens} output tokens, {stats.prompt_tokens} prompt tokens "
        f"({cached_share:.0%} cached), {stats.num_steps} steps",
        "per step": f"{stats.worker_busy_us / steps / 1000:.2f} ms worker, "
        f"{stats.schedule_us / steps / 1000:.3f} ms scheduling",
        "p50 / p99, ms": f"first token {_latency(stats.time_to_first_token_s)}, "
        f"between tokens {_latency(stats.inter_token_latency_s)}, "
        f"queue {_latency(stats.request_queue_time_s)}, "
        f"request {_latency(stats.e2e_request_latency_s)}",
        "finished": _counts(stats.finished),
        "rejected": _counts(stats.rejected),
        "graphs": f"{sum(graph.captured for graph in stats.graphs)}/{stats.num_graphs_planned} "
        f"captured; steps: {_counts(stats.graph_dispatch)}; "
        f"{sum(graph.padded_tokens for graph in stats.graphs)} padding tokens",
        "trouble": f"{stats.num_preemptions} preemptions, "
        f"{stats.num_worker_restarts} worker restarts, {stats.num_late_builds} late builds, "
        f"{stats.num_failed_steps} steps out of memory",
    }
    if stats.num_speculative_tokens:
        rows["drafts"] = _drafts(stats)
    if len(stats.ranks) > 1:
        rows["ranks"] = "; ".join(_describe_rank(rank, stats) for rank in stats.ranks)
    if stats.rank_loads:
        rows["requests by rank"] = "; ".join(
            f"{rank}: {load.num_running} running, {load.num_waiting} waiting, "
            f"{load.num_free_blocks} KV blocks free"
            for rank, load in enumerate(stats.rank_loads)
        )
    if stats.experts:
        rows["experts"] = _experts(stats)
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _state(stats: Stats) -> str:
    """Returns whether an engine serves, for how long it has run, and what its worker does."""
    state = f"{'ready' if stats.ready else 'not ready'}, up {stats.uptime_s:.0f} s"
    if stats.sleep_level or stats.sleep_state not in ("", "awake"):
        state += f"; {stats.sleep_state}, level {stats.sleep_level}"
    return f"{state}; {stats.worker_progress}" if stats.worker_progress else state


def _describe_rank(rank: RankInfo, stats: Stats) -> str:
    place = ""
    if any(each.pipeline_parallel_rank for each in stats.ranks):
        place = f" (stage {rank.pipeline_parallel_rank})"
    elif len(stats.ranks) > len(stats.rank_loads) > 1:
        place = f" (data-parallel rank {rank.data_parallel_rank})"
    return f"{rank.rank}{place} on {rank.device}, process {rank.pid}, {rank.num_blocks} KV blocks"


def _experts(stats: Stats) -> str:
    num_experts, num_ranks = len(stats.experts[0].expert_load), len(stats.experts[0].rank_load)
    shares = [
        max(layer.rank_load) * num_ranks / sum(layer.rank_load)
        for layer in stats.experts
        if any(layer.rank_load)
    ]
    load = "no tokens yet"
    if shares:
        load = f"the busiest rank has {sum(shares) / len(shares):.2f} times the mean load"
        load += f", {max(shares):.2f} in the worst layer"
    return (
        f"{num_experts} in {len(stats.experts)} layers, whole on {num_ranks} ranks; {load}; "
        f"{stats.num_expert_moves} layers moved"
    )


def _drafts(stats: Stats) -> str:
    accepted_share = stats.accepted_draft_tokens / max(stats.draft_tokens, 1)
    per_step = 1 + stats.accepted_draft_tokens / max(stats.num_verifications, 1)
    by_position = ", ".join(
        f"{count / max(stats.num_verifications, 1):.0%}" for count in stats.accepted_per_position
    )
    num_steps = max(1, sum(stats.steps_by_num_drafts.values()))
    by_length = ", ".join(
        f"{length} in {count / num_steps:.0%}"
        for length, count in sorted(stats.steps_by_num_drafts.items())
    )
    return (
        f"{stats.accepted_draft_tokens} of {stats.draft_tokens} accepted ({accepted_share:.0%}), "
        f"{per_step:.2f} tokens a step with at most {stats.num_speculative_tokens} "
        "drafts; "
        f"by position {by_position}; drafts of a step: {by_length}"
    )


def _rates(stats: Stats, before: Stats | None) -> str:
    # A restarted engine counts from 0 again, its uptime too.
    if before is None or stats.uptime_s <= before.uptime_s:
        return "-"
    elapsed_s = stats.uptime_s - before.uptime_s
    return (
        f"{(stats.output_tokens - before.output_tokens) / elapsed_s:.0f} output tokens/s, "
        f"{(stats.prompt_tokens - before.prompt_tokens) / elapsed_s:.0f} prompt tokens/s, "
        f"{(stats.num_steps - before.num_steps) / elapsed_s:.0f} steps/s"
    )


def _bar(share: float, width: int = 20) -> str:
    filled = round(share * width)
    return "█" * filled + "░" * (width - filled)


def _plain(figure: object) -> object:
    """Returns what JSON can say of a figure."""
    if isinstance(figure, engine_pb2.Histogram):
        return {
            "count": sum(figure.counts),
            "sum": figure.sum,
            **{f"p{percent}": _quantile(figure, percent / 100) for percent in (50, 90, 99)},
        }
    if isinstance(figure, Message):
        fields = figure.DESCRIPTOR.fields
        return {field.name: _plain(getattr(figure, field.name)) for field in fields}
    if isinstance(figure, Sequence) and not isinstance(figure, str):
        return list(map(_plain, figure))
    return dict(figure) if isinstance(figure, Mapping) else figure


def _quantile(histogram: engine_pb2.Histogram, share: float) -> float | None:
    """Returns the upper bound of the bucket that holds a quantile; None above the last bound."""
    rank = share * sum(histogram.counts)
    below = 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        below += count
        if below and below >= rank:
            return bound
    return None


def _latency(histogram: engine_pb2.Histogram) -> str:
    """Returns median and tail, each as the bound that it does not exceed."""
    if not sum(histogram.counts):
        return "-"
    median, tail = (_quantile(histogram, share) for share in (0.5, 0.99))
    return f"{_at_most(median)} / {_at_most(tail)}"


def _at_most(seconds: float | None) -> str:
    return "beyond" if seconds is None else f"{seconds * 1000:g}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
