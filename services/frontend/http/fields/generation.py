"""Request bodies of completions, chats and tokenization.

The names are those of OpenAI's API, plus extensions with the meaning of the gRPC API. The engine
checks further ranges.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.body import Body
from services.frontend.http.fields.inert import (
    CachedBody,
    InertFields,
    NeutralChatFields,
    NeutralCompletionFields,
)
from services.frontend.http.fields.refusals import NOT_SUPPORTED, refusal_of
from services.frontend.pipeline.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARACTERS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_MODEL_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from services.frontend.pipeline.tools import MAX_TOOLS
from services.frontend.text.surrogates import without_escaped_halves

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
            list[TokenId],
            Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True),
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


class TextPart(CachedBody):
    """Part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A function call of the model, with its arguments as JSON text; empty text is no arguments."""

    name: str
    arguments: str


class ToolCall(Body):
    """A previous tool call of the model."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: Annotated[int, Field(ge=0)] | None = None
    """Of a call that was put together from a stream; the order in the list counts."""


class FunctionDefinition(Body):
    """A function for the model to call."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool for the model to call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """A tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class PromptEndFields(Body):
    """Where the prompt of a conversation ends, with the names of transformers."""

    add_generation_prompt: bool | None = None
    """Absent: unless the last message is continued."""
    continue_final_message: bool | None = None


class ChatMessage(Body):
    """One message; an assistant's may have tool calls instead of content."""

    role: str
    name: str | None = None
    """For the chat template, which may show it."""
    content: (
        str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = (
        None
    )
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for it, as some servers call it."""
    prefix: bool | None = None
    """Of the last message: the reply continues it, as with `continue_final_message`."""
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    """OpenAI's own responses carry an empty list."""

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        both = (self.reasoning, self.reasoning_content)
        if None not in both and both[0] != both[1]:
            raise ValueError("reasoning and reasoning_content are one field; they must be equal")
        said = (self.content, self.reasoning_content, self.reasoning)
        if not self.tool_calls and said == (None, None, None):
            raise ValueError("a message must have content, or tool_calls")
        return self


class ChatCompletionRequest(SharedFields, PromptEndFields, NeutralChatFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """An empty list is the same as none."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    """A variable for the chat template, where that knows it."""
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    prediction: dict[str, Any] | None = None
    """A guess of the output, which may only save time; not used."""
    max_reasoning_tokens: Count | None = None
    echo: bool | None = None
    """Whether the answer begins with the content that it continues."""


class TokenizeRequest(PromptEndFields):
    """Body of POST /tokenize: a text, or a conversation with its tools."""

    model: Model | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    tools: (
        Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("there must be either a prompt or messages")
        return self


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: Model | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


_Body = TypeVar("_Body", bound=Body)
_Request = TypeVar("_Request", bound=SharedFields)


def parse_body(
    body_class: type[_Body],
    body: bytes,
    *,
    is_strict: bool = False,
    tags: Collection[str] = (),
    unknown: str = NOT_SUPPORTED,
) -> _Body:
    """Parses a body by its fields alone; for `tags` and `unknown` see `refusal_of`.

    With `is_strict` fields that nothing here can follow are refused.

    Halves of surrogate pairs, which texts cut by JavaScript have, become U+FFFD.

    Raises:
        InvalidRequestError: it is not JSON, or a field is missing, wrong or not supported.
    """
    try:
        return body_class.model_validate_json(body, context=is_strict)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] == "json_invalid":
            whole = without_escaped_halves(body)
            if whole != body:
                return parse_body(
                    body_class, whole, is_strict=is_strict, tags=tags, unknown=unknown
                )
        raise refusal_of(error, tags=tags, known=body_class.model_fields, unknown=unknown) from None


def parse(request_class: type[_Request], body: bytes, *, is_strict: bool = False) -> _Request:
    """Parses the body of a request to the model.

    Raises:
        InvalidRequestError: it is not JSON, or a field is missing, wrong or not supported.
    """
    request = parse_body(request_class, body, is_strict=is_strict)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options is for streams only", field="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs is not for streams", field="prompt_logprobs")
    return request
