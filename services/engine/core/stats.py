"""The engine's counts since its start, and its state."""

from collections import Counter
from dataclasses import dataclass, field

from protos.engine.v1.worker_pb2 import RankInfo, WorkerReady
from services.engine.batch import BatchDescriptor, FallbackReason, StepResult, read_int32
from services.engine.capture_sizes.coverage import GraphCoverage
from services.engine.core.adapter_figures import AdapterFigures
from services.engine.core.graph_ledger import GraphLedger
from services.engine.core.latencies import Latencies
from services.engine.core.recent_steps import RecentSteps
from services.engine.scheduler.data_parallel import AnyScheduler
from services.engine.scheduler.stats import RankLoad, SchedulerCounts
from services.engine.scheduler.tier_orders import TierOrders


@dataclass(slots=True)
class DraftCounts:
    """Counts of speculative decoding.

    num_verified, num_accepted: draft tokens. num_verifications: verifications of a request's
    drafts. accepted_per_position: accepted drafts by their position among a request's.
    steps_by_length: steps by the number of drafts that they order for each request.
    """

    num_verified: int = 0
    num_accepted: int = 0
    num_verifications: int = 0
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    steps_by_length: Counter[int] = field(default_factory=Counter)

    def count_step(self, descriptor: BatchDescriptor) -> None:
        """Counts a step that ran, by the drafts that it ordered."""
        if descriptor.HasField("spec_decode_metadata"):
            self.steps_by_length[descriptor.spec_decode_metadata.num_next_drafts] += 1

    def count(self, descriptor: BatchDescriptor, result: StepResult) -> None:
        """Counts the drafts that a step verified, of one data-parallel rank."""
        if result.num_accepted_tokens:
            num_drafts = read_int32(descriptor.spec_decode_metadata.num_draft_tokens)
            self.num_verified += int(num_drafts.sum())
            self.num_verifications += int((num_drafts > 0).sum())
            accepted = read_int32(result.num_accepted_tokens)
            self.num_accepted += int(accepted.sum())
            for position in range(int(accepted.max(initial=0))):
                self.accepted_per_position[position] += int((accepted > position).sum())


@dataclass(slots=True)
class Counters:
    """Counts that outlive a worker; each part of the engine counts its own events."""

    num_steps: int = 0
    num_step_tokens: int = 0
    """Query tokens of these steps."""
    worker_busy_us: int = 0
    schedule_ns: int = 0
    num_worker_restarts: int = 0
    num_late_builds: int = 0
    num_expert_moves: int = 0
    """Times that a layer's experts were moved between ranks."""
    num_failed_steps: int = 0
    """Steps that ran out of memory."""
    finished: Counter[str] = field(default_factory=Counter)
    """Requests that ended, by reason: stop, length, aborted, failed."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Requests that were refused, by status code name."""
    graph_dispatch: Counter[int] = field(default_factory=Counter)
    """Steps by FallbackReason."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    images_by_run: Counter[str] = field(default_factory=Counter)
    """Encoded images by how the encoder ran: graph, compiled or eager."""
    latencies: Latencies = field(default_factory=Latencies)
    recent_steps: RecentSteps = field(default_factory=RecentSteps)
    scheduler: SchedulerCounts = field(default_factory=SchedulerCounts)

    def count(self, descriptor: BatchDescriptor, result: StepResult) -> None:
        """Counts the drafts and images of a step that ran."""
        self.drafts.count_step(descriptor)
        self.drafts.count(descriptor, result)
        self.count_images(result)

    def count_images(self, result: StepResult) -> None:
        """Counts the images that one data-parallel rank encoded in a step."""
        run = result.encoder_run
        if run.num_images:
            without_graph = "compiled" if run.is_compiled else "eager"
            name = "graph" if run.HasField("graph_key") else without_graph
            self.images_by_run[name] += run.num_images

    def steps_by_dispatch(self) -> dict[str, int]:
        """Returns the steps by fallback reason in lower case, or "graph" if they ran one."""
        return {dispatch_name(reason): count for reason, count in self.graph_dispatch.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's present load; cheap to read."""

    step_age_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks that requests hold."""
    num_recent_tokens: int = 0
    """Tokens computed lately; see RecentWork."""

    @classmethod
    def of(
        cls, scheduler: AnyScheduler, num_blocks: int, step_age_s: float, num_recent_tokens: int
    ) -> "EngineLoad":
        """Returns the load of a scheduler; num_blocks: of its cache, with one null block."""
        num_free_blocks = scheduler.num_free_blocks
        return cls(
            step_age_s=step_age_s,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=num_free_blocks,
            num_used_blocks=num_blocks - 1 - num_free_blocks,
            num_recent_tokens=num_recent_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The figures of GetStats, without the RPC layer's own."""

    uptime_s: float
    load: EngineLoad
    num_blocks: int
    num_cached_blocks: int
    num_state_blocks: int
    """Blocks of a request's state; 0 of a model without states."""
    num_snapshots: int
    """Snapshots of states that can be found."""
    tiers: tuple[TierOrders, ...]
    """The tiers below the GPU of each data-parallel rank; empty without a worker."""
    worker: WorkerReady
    """The last worker's announcement; empty before the first."""
    num_speculative_tokens: int
    num_batched_tokens_limit: int
    is_ready: bool
    graphs: GraphLedger
    coverage: GraphCoverage
    counters: Counters
    ranks: tuple[RankInfo, ...] = ()
    """The processes that run the model; empty before the first worker is ready."""
    rank_loads: tuple[RankLoad, ...] = ()
    """The loads of data-parallel ranks; empty where there is one."""
    worker_progress: str = ""
    """The last stage of a start, or why the last worker was lost; empty while one serves."""
    adapters: AdapterFigures | None = None
    """Adapters; None where the engine has no room for any."""
    sleep_state: str = "awake"
    sleep_level: int = 0
    """Level of the present sleep; 0 without one."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks that the host's memory holds."""
        return sum(each.num_host_blocks for each in self.tiers)

    @property
    def num_disk_blocks(self) -> int:
        """Blocks on disk."""
        return sum(each.num_disk_blocks for each in self.tiers)


def dispatch_name(reason: int) -> str:
    """Returns a FallbackReason in lower case, or "graph"."""
    if reason == FallbackReason.FALLBACK_REASON_UNSPECIFIED:
        return "graph"
    return FallbackReason.Name(reason).removeprefix("FALLBACK_REASON_").lower()
