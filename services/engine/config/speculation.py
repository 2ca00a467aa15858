"""Speculative decoding."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.engine.config.section import ConfigSection


class SpeculationConfig(ConfigSection):
    """Speculative decoding."""

    num_speculative_tokens: int = Field(default=0, ge=0, le=8)
    """Tokens that are guessed ahead of each request in each step; 0 turns speculation off."""
    min_speculative_tokens: int = Field(default=0, ge=0, le=8)
    """Fewest tokens to guess ahead. Measured times and accepted guesses decide between this and
    --num-speculative-tokens."""
    speculative_method: Literal["mtp", "ngram"] = "mtp"
    """Source of the guesses. mtp: the model's draft layers; ngram: what followed the last tokens
    earlier in the request."""
    draft_model: Path | None = None
    """Folder of a small model of the same vocabulary, of an EAGLE-3 head or of an assistant of
    Gemma 4, which guesses instead; it needs --num-speculative-tokens."""
    prompt_lookup_min: int = Field(default=2, ge=1, le=16)
    """Fewest last tokens that ngram looks for."""
    prompt_lookup_max: int = Field(default=4, ge=1, le=16)
    """Most last tokens that ngram looks for; the longest that is found decides."""

    @model_validator(mode="after")
    def _check_draft_model(self) -> Self:
        if self.draft_model is None:
            return self
        if self.speculative_method == "ngram":
            raise ValueError("--draft-model and --speculative-method ngram exclude each other")
        if not self.num_speculative_tokens:
            raise ValueError("--draft-model needs --num-speculative-tokens, which is 0")
        return self

    @model_validator(mode="after")
    def _check_fewest(self) -> Self:
        fewest, most = self.min_speculative_tokens, self.num_speculative_tokens
        if fewest > most:
            raise ValueError(
                f"--min-speculative-tokens is {fewest}: it must be at most "
                f"--num-speculative-tokens, which is {most}"
            )
        return self

    @model_validator(mode="after")
    def _check_lookup(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"--prompt-lookup-min is {self.prompt_lookup_min}: it must be at most "
                f"--prompt-lookup-max, which is {self.prompt_lookup_max}"
            )
        return self

    @property
    def num_layer_drafts(self) -> int:
        """Tokens that the model's draft layers guess; 0 where it needs none of them."""
        others = self.speculative_method != "mtp" or self.has_draft_model
        return 0 if others else self.num_speculative_tokens

    @property
    def has_draft_model(self) -> bool:
        """Whether a small model guesses."""
        return self.draft_model is not None

    @property
    def lookup_sizes(self) -> tuple[int, int] | None:
        """The shortest and the longest n-gram to look up; None where others guess."""
        if self.speculative_method != "ngram" or not self.num_speculative_tokens:
            return None
        return self.prompt_lookup_min, self.prompt_lookup_max
