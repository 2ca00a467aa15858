"""What the scheduler holds and what it has done."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler at one moment; counts run from its start."""

    num_free_blocks: int
    """Blocks that nobody holds."""
    num_cached_blocks: int
    """Free blocks whose content can still be found."""
    prompt_tokens: int
    """Prompt tokens of admitted requests."""
    cached_tokens: int
    """Those of them that came from the prefix cache."""
    output_tokens: int
    """Tokens generated for requests that were still live."""
    num_preemptions: int
    """Times a running request gave its blocks back to start over."""
    num_batched_tokens_limit: int
    """Query tokens that a step may have now."""
