"""Fields of requests that run the model.

The names are those of OpenAI's API, plus extensions with the meaning of the gRPC API. The engine
checks further ranges.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.body import Body
from services.frontend.http.fields.inert import InertFields
from services.frontend.http.fields.parse import parse_body
from services.frontend.pipeline.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARACTERS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_MODEL_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from services.frontend.pipeline.tools import MAX_TOOLS

_UINT32 = Field(ge=0, le=2**32 - 1)

TokenId = Annotated[int, _UINT32]
Count = Annotated[int, _UINT32]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Model = Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)]
StopString = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Chunks are never padded."""


class StructuredOutputs(Body):
    """The form of the output; exactly one field, with vLLM's names."""

    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: str | None = None


class GenerationFields(Body):
    """Fields of every request in OpenAI's form that runs the model."""

    model: Model
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """-1 is the same as no seed."""
    stop: (
        StopString
        | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
        | None
    ) = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    """Absent: true."""
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
        ]
        | None
    ) = None

    top_k: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    """-1 and 0 keep all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.0625, le=10)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    num_speculative_tokens: Count | None = None
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    allowed_token_ids: (
        Annotated[
            list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)
        ]
        | None
    ) = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
        ]
        | None
    ) = None
    """Texts that the output may not have."""

    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARACTERS)] | None = None
    parse_special_tokens: bool | None = None


class JsonSchema(Body):
    """A schema for the answer, and its name.

    The answer always follows it exactly, whatever `strict` is.
    """

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    """Not shown to the model."""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class Structure(Body):
    """A part of an answer between fixed texts."""

    begin: Annotated[str, Field(min_length=1)]
    schema_: dict[str, Any] = Field(alias="schema")
    end: str


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: (
        Annotated[list[Structure], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None
    ) = None
    """Parts of a structural_tag, beside free text."""
    triggers: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    """Texts after which a structural_tag must go on as one of its parts, which begin with them."""

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with the type json_schema, and only then")
        is_tag = self.type == "structural_tag"
        if is_tag != (self.structures is not None) or is_tag != (self.triggers is not None):
            raise ValueError(
                "structures and triggers must be given with the type structural_tag, and only then"
            )
        return self


class SharedFields(InertFields, GenerationFields):
    """Fields of both completions and chat completions."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    """Most tokens of the prompt, which keeps its last ones; -1: as many as fit."""
    response_format: ResponseFormat | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        """Whether each chunk of a stream has the usage up to it."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


_Request = TypeVar("_Request", bound=SharedFields)


def parse(
    request_class: type[_Request],
    body: bytes,
    *,
    is_strict: bool = False,
    tags: Collection[str] = (),
) -> _Request:
    """Parses the body of a request to the model; for `tags` see `refusal_of`.

    Raises:
        InvalidRequestError: it is not JSON, or a field is missing, wrong or not supported.
    """
    request = parse_body(request_class, body, is_strict=is_strict, tags=tags)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options is for streams only", field="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs is not for streams", field="prompt_logprobs")
    return request
