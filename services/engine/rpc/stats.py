"""The engine's statistics as protobuf."""

from collections.abc import Iterable
from dataclasses import asdict

from protos.engine.v1 import engine_pb2
from protos.engine.v1.engine_pb2 import (
    AdapterStats,
    ExpertStats,
    GetStatsResponse,
    GraphCoverage,
    GraphStats,
    RankLoad,
)
from protos.engine.v1.worker_pb2 import KeptWeights
from services.engine.capture_sizes.coverage import Coverage
from services.engine.capture_sizes.history import StepHistory
from services.engine.core.expert_balance import ExpertFigures
from services.engine.core.graph_ledger import GraphFigures
from services.engine.core.stats import EngineStats
from services.telemetry.histogram import Histogram


def stats_to_proto(
    stats: EngineStats,
    *,
    num_sessions: int,
    step_sizes: StepHistory | None = None,
    weights: Iterable[KeptWeights] = (),
    weights_version: str = "",
    experts: Iterable[ExpertFigures] = (),
) -> GetStatsResponse:
    """Converts a snapshot of the statistics."""
    load, counters = stats.load, stats.counters
    tiers = counters.scheduler.tiers
    return GetStatsResponse(
        uptime_s=stats.uptime_s,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_blocks=stats.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_state_blocks=stats.num_state_blocks,
        num_snapshots=stats.num_snapshots,
        state_bytes=stats.num_state_blocks * stats.worker.block_bytes,
        num_snapshots_made=counters.scheduler.num_snapshots_made,
        num_snapshots_used=counters.scheduler.num_snapshots_used,
        num_recomputed_tokens=counters.scheduler.recomputed_tokens,
        num_host_blocks=stats.num_host_blocks,
        num_host_stores=tiers.num_stored,
        num_host_loads=tiers.num_loaded,
        host_copy_bytes=(tiers.num_stored + tiers.num_loaded) * stats.worker.block_bytes,
        host_copy_s=tiers.copy_s,
        host_hit_tokens=tiers.hit_tokens,
        num_disk_blocks=stats.num_disk_blocks,
        num_disk_writes=tiers.num_written,
        num_disk_reads=tiers.num_read,
        disk_read_s=tiers.read_s,
        disk_hit_tokens=tiers.disk_hit_tokens,
        num_disk_faults=tiers.num_faults,
        num_disk_drops=tiers.num_drops,
        num_encoded_images=counters.scheduler.num_encoded_images,
        num_found_images=counters.scheduler.num_found_images,
        images_by_run=counters.images_by_run,
        num_steps=counters.num_steps,
        prompt_tokens=counters.scheduler.prompt_tokens,
        cached_tokens=counters.scheduler.cached_tokens,
        output_tokens=counters.scheduler.output_tokens,
        finished=counters.finished,
        rejected=counters.rejected,
        num_preemptions=counters.scheduler.num_preemptions,
        num_worker_restarts=counters.num_worker_restarts,
        num_late_builds=counters.num_late_builds,
        num_failed_steps=counters.num_failed_steps,
        num_batched_tokens_limit=stats.num_batched_tokens_limit,
        time_to_first_token_s=_histogram_to_proto(counters.latencies.time_to_first_token),
        inter_token_latency_s=_histogram_to_proto(counters.latencies.inter_token_latency),
        e2e_request_latency_s=_histogram_to_proto(counters.latencies.e2e_request_latency),
        request_queue_time_s=_histogram_to_proto(counters.latencies.request_queue_time),
        worker_busy_us=counters.worker_busy_us,
        schedule_us=counters.schedule_ns // 1000,
        graph_dispatch=counters.steps_by_dispatch(),
        num_sessions=num_sessions,
        ready=stats.is_ready,
        cudagraph_mode=stats.graphs.mode,
        cudagraph_mode_reason=stats.graphs.mode_reason,
        num_graphs_planned=stats.graphs.num_planned,
        pass_matches=stats.graphs.pass_matches,
        graphs=[_graph_to_proto(figures) for figures in stats.graphs.figures],
        decode_coverage=_coverage_to_proto(stats.coverage.decodes),
        other_coverage=_coverage_to_proto(stats.coverage.others),
        weights=weights,
        decode_steps=step_sizes.decodes if step_sizes else {},
        other_steps=step_sizes.others if step_sizes else {},
        num_speculative_tokens=stats.num_speculative_tokens,
        draft_tokens=counters.drafts.num_verified,
        accepted_draft_tokens=counters.drafts.num_accepted,
        num_verifications=counters.drafts.num_verifications,
        accepted_per_position=[
            counters.drafts.accepted_per_position[position]
            for position in range(stats.num_speculative_tokens)
        ],
        steps_by_num_drafts=counters.drafts.steps_by_length,
        ranks=stats.ranks,
        experts=map(_experts_to_proto, experts),
        num_expert_moves=counters.num_expert_moves,
        rank_loads=[RankLoad(**asdict(each)) for each in stats.rank_loads],
        worker_progress=stats.worker_progress,
        sleep_state=stats.sleep_state,
        sleep_level=stats.sleep_level,
        weights_version=weights_version,
        adapters=_adapters_to_proto(stats),
    )


def _adapters_to_proto(stats: EngineStats) -> AdapterStats | None:
    figures, counts = stats.adapters, stats.counters.scheduler
    if figures is None:
        return None
    return AdapterStats(
        num_slots=figures.num_slots,
        num_known=figures.num_known,
        num_resident=figures.num_resident,
        num_read=figures.num_read,
        read_s=figures.read_s,
        num_slot_loads=counts.num_adapter_loads,
        num_evictions=counts.num_adapter_evictions,
        num_waiting_for_slot=figures.num_waiting_for_slot,
        num_running=figures.running,
        num_waiting=figures.waiting,
    )


def _experts_to_proto(layer: ExpertFigures) -> ExpertStats:
    return ExpertStats(
        expert_load=layer.expert_load,
        physical_to_logical=layer.placement.physical_to_logical,
        rank_load=layer.placement.rank_loads(layer.expert_load),
    )


def _histogram_to_proto(histogram: Histogram) -> engine_pb2.Histogram:
    return engine_pb2.Histogram(bounds=histogram.bounds, counts=histogram.counts, sum=histogram.sum)


def _coverage_to_proto(coverage: Coverage) -> GraphCoverage:
    return GraphCoverage(
        sizes=coverage.sizes, limit=coverage.limit, max_padding=coverage.max_padding
    )


def _graph_to_proto(figures: GraphFigures) -> GraphStats:
    return GraphStats(
        kind=figures.key.kind,
        num_tokens=figures.key.num_tokens,
        graph_bs=figures.key.graph_bs,
        max_q_len=figures.key.max_q_len,
        captured=not figures.fault,
        capture_s=figures.capture_s,
        num_bytes=figures.num_bytes,
        num_replays=figures.num_replays,
        padded_tokens=figures.padded_tokens,
        fault=figures.fault,
        shares_prefixes=figures.key.shares_prefixes,
        skips_adapters=figures.key.skips_adapters,
    )
