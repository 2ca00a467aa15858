"""The engine's figures for Prometheus, read from the counters of GetStats.

A figure that vLLM has too has the same name, with `octavo_` instead of `vllm:`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from services.engine.batch import FallbackReason
from services.engine.core.engine_core import EngineCore
from services.engine.core.latencies import Latencies
from services.engine.core.stats import EngineStats, dispatch_name
from services.engine.edge.status import STATUS_CODES
from services.engine.request import FinishReason
from services.engine.rpc.adapter_metrics import adapter_families
from services.telemetry.loop_lag import LoopLag
from services.telemetry.metrics import Families
from services.transport.refused_calls import RefusedCalls

FINISHED = (*(reason.value for reason in FinishReason), "failed")
REJECTED = tuple(code.name for code in STATUS_CODES.values())
DISPATCHED = tuple(map(dispatch_name, FallbackReason.values()))
"""Label values that are exported from the start, with a count of 0."""
_RANK_LOADS = {
    "num_running": "Requests of a data-parallel rank that hold blocks",
    "num_waiting": "Requests of a data-parallel rank that wait",
    "num_free_blocks": "KV blocks of a data-parallel rank that no request holds",
}
_LATENCIES = {
    "time_to_first_token_seconds": "Arrival to first token",
    "inter_token_latency_seconds": "Token to token",
    "e2e_request_latency_seconds": "Arrival to end",
    "request_queue_time_seconds": "Arrival to first step",
    "request_prefill_time_seconds": "First step to first token",
    "request_decode_time_seconds": "First to last token",
    "request_prompt_tokens": "Prompt tokens of a request",
    "request_generation_tokens": "Tokens generated for a request",
}


class EngineFamilies:
    """Collects an engine's present figures, labelled with the model's name."""

    def __init__(
        self,
        core: EngineCore,
        *,
        model: str,
        num_sessions: Callable[[], int],
        lag: LoopLag,
        refused: RefusedCalls,
    ) -> None:
        self._core = core
        self._refused = refused
        self._num_sessions = num_sessions
        self._lag = lag
        self._families = Families("octavo", model_name=model)

    def __call__(self) -> Iterable[Any]:
        """Returns every family."""
        stats = self._core.stats()
        yield from self._now(stats)
        yield from self._totals(stats)
        yield from self._steps(stats)
        yield from self._families.loop_lag(self._lag)
        if stats.adapters is not None:
            done = stats.counters.scheduler
            yield from adapter_families(self._families, stats.adapters, done)
        yield from self._latencies(stats.counters.latencies)

    def _now(self, stats: EngineStats) -> Iterable[Any]:
        gauge, load = self._families.gauge, stats.load
        # The null block is never given out.
        num_usable = max(stats.num_blocks - 1, 0)
        used = (num_usable - load.num_free_blocks) / num_usable if num_usable else 0.0
        yield gauge("num_requests_running", load.num_running, "Requests that hold blocks")
        yield gauge("num_requests_waiting", load.num_waiting, "Requests that wait")
        yield gauge("kv_cache_usage_perc", used, "Share of KV blocks that requests hold, 0 to 1")
        yield gauge("kv_cache_blocks", num_usable, "KV blocks that requests can hold")
        yield gauge("kv_cache_cached_blocks", stats.num_cached_blocks, "Free blocks with content")
        if stats.num_state_blocks:
            yield gauge("snapshots", stats.num_snapshots, "States that requests can start from")
            yield gauge(
                "state_bytes",
                stats.num_state_blocks * stats.worker.block_bytes,
                "Bytes of a request's state on one rank",
            )
        if stats.worker.num_host_slots:
            yield gauge("kv_host_blocks", stats.num_host_blocks, "Blocks in the host's memory")
        yield gauge("sessions", self._num_sessions(), "Frontends connected")
        yield gauge("ready", stats.is_ready, "1 while new requests are taken")
        yield gauge("sleep_level", stats.sleep_level, "Level of the present sleep, 0 while awake")
        yield gauge("step_age_seconds", load.step_age_s, "Time since the last step, 0 when idle")
        yield gauge(
            "batched_tokens_limit",
            stats.num_batched_tokens_limit,
            "Query tokens that a step may have",
        )
        if version := self._core.weights.version:
            yield self._families.gauges(
                "weights_info",
                "version",
                {version: 1},
                "1, with the version of the weights that serve",
            )
        if stats.ranks:
            yield self._families.gauges(
                "rank_kv_cache_blocks",
                "rank",
                {str(each.rank): each.num_blocks for each in stats.ranks},
                "KV blocks for which a rank has memory",
            )
        for name, what in _RANK_LOADS.items():
            loads = {str(rank): getattr(each, name) for rank, each in enumerate(stats.rank_loads)}
            if loads:
                yield self._families.gauges(
                    f"rank_{name.removeprefix('num_')}", "rank", loads, what
                )
        yield gauge("graphs_captured", len(stats.graphs.captured), "Graphs that may be replayed")
        yield gauge("graphs_planned", stats.graphs.num_planned, "Graphs that are to be captured")

    def _totals(self, stats: EngineStats) -> Iterable[Any]:
        counter, counters = self._families.counter, self._families.counters
        done = stats.counters.scheduler
        yield counter("prompt_tokens", done.prompt_tokens, "Prompt tokens of admitted requests")
        yield counter("generation_tokens", done.output_tokens, "Tokens generated")
        yield counter("prefix_cache_queries", done.prompt_tokens, "Prompt tokens looked up")
        yield counter("prefix_cache_hits", done.cached_tokens, "Prompt tokens found computed")
        if stats.num_state_blocks:
            yield counter("snapshots_made", done.num_snapshots_made, "Copies of states kept")
            yield counter("snapshots_used", done.num_snapshots_used, "Requests started from one")
            yield counter(
                "recomputed_tokens",
                done.recomputed_tokens,
                "Tokens with cached blocks but without a snapshot",
            )
        if stats.worker.num_host_slots:
            yield from self._tiers(stats)
        if done.num_encoded_images:
            yield counter("images_encoded", done.num_encoded_images, "Images encoded")
            yield counter("images_found", done.num_found_images, "Images encoded before")
            yield counters(
                "encoder_images",
                "run",
                dict.fromkeys(("graph", "compiled", "eager"), 0) | stats.counters.images_by_run,
                "Images by how the encoder ran",
            )
        drafts = stats.counters.drafts
        yield counter("spec_decode_num_draft_tokens", drafts.num_verified, "Drafts verified")
        yield counter("spec_decode_num_accepted_tokens", drafts.num_accepted, "Drafts that held")
        yield counter("spec_decode_num_drafts", drafts.num_verifications, "Verifications of drafts")
        yield counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "position",
            {
                str(at): drafts.accepted_per_position[at]
                for at in range(max(1, stats.num_speculative_tokens))
            },
            "Drafts that held, by their position among a request's",
        )
        yield counters(
            "spec_decode_steps_by_num_drafts",
            "num_drafts",
            {
                str(count): drafts.steps_by_length[count]
                for count in range(1 + stats.num_speculative_tokens)
            },
            "Steps by the tokens that they guess ahead of each request",
        )
        yield counter("num_preemptions", done.num_preemptions, "Requests that started over")
        yield counter(
            "worker_restarts", stats.counters.num_worker_restarts, "Workers started again"
        )
        yield counter("failed_steps", stats.counters.num_failed_steps, "Steps out of memory")
        yield counter("late_builds", stats.counters.num_late_builds, "Compilations while serving")
        yield counters(
            "request_success",
            "finished_reason",
            dict.fromkeys(FINISHED, 0) | stats.counters.finished,
            "Requests that ended, by reason",
        )
        yield counter(
            "calls_refused",
            self._refused.num_calls,
            "Calls of peers without permission, or under a host that is not answered",
        )
        yield counters(
            "requests_rejected",
            "code",
            dict.fromkeys(REJECTED, 0) | stats.counters.rejected,
            "Requests that were refused, by status code",
        )

    def _tiers(self, stats: EngineStats) -> Iterable[Any]:
        counter, tiers = self._families.counter, stats.counters.scheduler.tiers
        num_bytes = (tiers.num_stored + tiers.num_loaded) * stats.worker.block_bytes
        yield counter("kv_host_stores", tiers.num_stored, "Blocks copied to the host's memory")
        yield counter("kv_host_loads", tiers.num_loaded, "Blocks copied back")
        yield counter("kv_host_copy_bytes", num_bytes, "Bytes of these copies")
        yield counter("kv_host_copy_seconds", tiers.copy_s, "Time of these copies")
        yield counter("kv_host_hits", tiers.hit_tokens, "Prefix tokens that came back")
        if stats.worker.has_disk:
            yield self._families.gauge("kv_disk_blocks", stats.num_disk_blocks, "Blocks on disk")
            yield counter("kv_disk_writes", tiers.num_written, "Blocks written to disk")
            yield counter("kv_disk_reads", tiers.num_read, "Blocks read from disk")
            yield counter("kv_disk_read_seconds", tiers.read_s, "Time of these reads")
            yield counter("kv_disk_hits", tiers.disk_hit_tokens, "Prefix tokens read from disk")
            yield counter("kv_disk_faults", tiers.num_faults, "Files damaged or foreign")
            yield counter("kv_disk_drops", tiers.num_drops, "Blocks that were not written")

    def _steps(self, stats: EngineStats) -> Iterable[Any]:
        counter, counts = self._families.counter, stats.counters
        yield self._families.counters(
            "steps",
            "dispatch",
            dict.fromkeys(DISPATCHED, 0) | counts.steps_by_dispatch(),
            "Steps that ran a graph, or by the reason why they ran none",
        )
        yield counter("step_tokens", counts.num_step_tokens, "Query tokens of all steps")
        padded = sum(each.padded_tokens for each in stats.graphs.figures if not each.is_encoder)
        yield counter("graph_padded_tokens", padded, "Query tokens that only filled graphs")
        yield counter("worker_busy_seconds", counts.worker_busy_us / 1e6, "Time of the worker")
        yield counter("schedule_seconds", counts.schedule_ns / 1e9, "Time spent scheduling")

    def _latencies(self, latencies: Latencies) -> Iterable[Any]:
        for name, what in _LATENCIES.items():
            values = getattr(latencies, name.removesuffix("_seconds"))
            yield self._families.histogram(name, values, what)
