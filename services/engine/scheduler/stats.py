"""Counts of the scheduler's work."""

from dataclasses import dataclass, field

from services.engine.kv_cache.host_tier import TierCounts


@dataclass(slots=True)
class SchedulerCounts:
    """Counts that outlive a scheduler."""

    prompt_tokens: int = 0
    """Prompt tokens of admitted requests."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    num_snapshots_made: int = 0
    """Copies of states that others can start from."""
    num_snapshots_used: int = 0
    """Requests that started from one."""
    recomputed_tokens: int = 0
    """Tokens with cached blocks that requests computed again, as no snapshot was after them."""
    num_encoded_images: int = 0
    """Images that steps encoded."""
    num_found_images: int = 0
    """Images of requests that were encoded before."""
    output_tokens: int = 0
    """Tokens generated for requests that were still live."""
    num_preemptions: int = 0
    """Times a running request gave its blocks back to start over."""
    num_adapter_loads: int = 0
    """Adapters copied into a slot."""
    num_adapter_evictions: int = 0
    """Loads that took the slot of another adapter."""
    tiers: TierCounts = field(default_factory=TierCounts)
    """Blocks that went to the host's memory and came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """The present load of one data-parallel rank."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
