"""Speculative decoding."""

from pydantic import Field

from services.engine.config.section import ConfigSection


class SpeculationConfig(ConfigSection):
    """Speculative decoding."""

    num_speculative_tokens: int = Field(default=0, ge=0, le=8)
    """Tokens that the model's draft layers guess ahead in each step; 0 turns speculation off."""
