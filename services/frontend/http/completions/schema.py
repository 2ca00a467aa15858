"""Bodies of POST /v1/completions."""

from typing import Annotated, Literal

from pydantic import Field

from services.frontend.http.fields.generation import Count, SharedFields, Tokens
from services.frontend.http.fields.inert import NeutralCompletionFields


class CompletionRequest(SharedFields, NeutralCompletionFields):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    )
    max_tokens: Count | None = None
    """0 is for `echo`."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Only as many as `n`: then all are returned."""
    suffix: Literal[""] | None = None
    echo: bool | None = None
