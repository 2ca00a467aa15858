"""Structured output."""

from pydantic import Field

from services.engine.config.section import ConfigSection
from services.settings.flags import MAX_INT32


class GrammarConfig(ConfigSection):
    """Limits of structured output."""

    max_grammar_bytes: int = Field(default=2**16, ge=1, le=MAX_INT32)
    """Longest schema, regular expression or grammar of a request, in bytes."""
    max_structured_requests: int = Field(default=256, ge=1, le=MAX_INT32)
    """Most live requests whose output follows a grammar; beyond it they are refused."""
    grammar_timeout_s: float = Field(default=5.0, gt=0, le=30)
    """Longest time to compile a grammar, and to find out what it allows for one token."""
    num_grammar_threads: int = Field(default=4, ge=1, le=64)
    """Threads that find out what grammars allow, beside the steps."""
