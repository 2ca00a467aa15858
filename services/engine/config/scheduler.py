"""Limits of steps and of the queue."""

from pydantic import Field

from services.engine.config.section import ConfigSection
from services.settings.flags import MAX_INT32

DEFAULT_BATCHED_TOKENS = 2048
PROMPT_SHARE = 4
"""Divisor of a step's budget: this part is kept for the prompt that arrived first."""


class SchedulerConfig(ConfigSection):
    """Limits of a step and of the queue."""

    max_num_seqs: int = Field(default=512, ge=1, le=4096)
    """Most requests in one step; as many run as memory has room for, up to this."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    """Most query tokens in one step; prompts are computed in chunks that fit. By default 2048, or
    more where all requests with their drafts, beside a quarter of --max-num-mixed-tokens, need
    it."""
    max_num_mixed_tokens: int = Field(default=1024, ge=1, le=MAX_INT32)
    """Most query tokens in one step while requests decode and few prompts wait, or a quarter of
    that beside them if they are many: the smaller, the shorter the gaps between tokens, and the
    later first tokens. With more than four times as many tokens of prompts, steps are whole."""
    max_num_waiting: int = Field(default=1024, ge=1, le=MAX_INT32)
    """Most requests that wait; beyond it they are refused with RESOURCE_EXHAUSTED."""
    priority_ageing_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds of waiting that priority 1 is worth; the priority made up for doubles with each."""
