"""Responses and their items: their types, from which OpenAPI's schemas come."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from services.frontend.http.answers.weights import WeightsField
from services.frontend.http.responses.tool_schema import (
    AllowedTools,
    CustomChoice,
    CustomTool,
    FunctionChoice,
    NamespaceTool,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class TokenLogprob(TypedDict):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(TokenLogprob):
    """A token of a text, and the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class OutputText(TypedDict):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty."""
    logprobs: list[TextLogprob]
    """Empty unless `include` asks for them."""


class OutputReasoningText(TypedDict):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


OutputPart = Annotated[OutputText | OutputReasoningText, Field(discriminator="type")]


class OutputMessage(TypedDict):
    """A message of the model."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(TypedDict):
    """Reasoning of the model, in full; the summary is empty."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[OutputReasoningText]


class ToolNames(TypedDict):
    """Names of a called tool."""

    name: str
    namespace: NotRequired[str]
    """The name space of the tool; absent if it has none."""


class OutputCall(ToolNames):
    """A function call of the model, with its arguments as JSON text."""

    type: Literal["function_call"]
    id: str
    call_id: str
    arguments: str
    status: ItemStatus


class OutputCustomCall(ToolNames):
    """A call of the model with a text as its input."""

    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    input: str
    status: ItemStatus


OutputItem = Annotated[
    OutputMessage | OutputReasoning | OutputCall | OutputCustomCall, Field(discriminator="type")
]


class InputTokensDetails(TypedDict):
    """Parts of a prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Parts of an output's tokens."""

    reasoning_tokens: int


class ResponseUsage(WeightsField):
    """The usage in tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseProblem(TypedDict):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseCut(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class RepeatedTool(TypedDict):
    """A function of the request."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


RepeatedAnyTool = Annotated[RepeatedTool | CustomTool | NamespaceTool, Field(discriminator="type")]
RepeatedChoice = Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedTools


class RepeatedPlainFormat(TypedDict):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class RepeatedSchemaFormat(TypedDict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: str
    description: str | None
    schema: dict[str, Any]
    strict: bool


RepeatedFormat = Annotated[RepeatedPlainFormat | RepeatedSchemaFormat, Field(discriminator="type")]


class RepeatedText(TypedDict):
    """Options of the text."""

    format: RepeatedFormat
    verbosity: str


class RepeatedReasoning(TypedDict):
    """Options of the reasoning."""

    effort: str | None
    summary: str | None


class InputTokenCount(TypedDict):
    """The number of tokens of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Sampling(TypedDict):
    """Settings of sampling, or their defaults."""

    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float


class Settings(TypedDict):
    """Settings of the request, or their defaults, which a response repeats."""

    instructions: str | None
    previous_response_id: str | None
    tools: list[RepeatedAnyTool]
    """The tools that the model may get; hosted ones are left out."""
    tool_choice: RepeatedChoice
    parallel_tool_calls: bool
    text: RepeatedText
    reasoning: RepeatedReasoning
    max_output_tokens: int | None
    max_tool_calls: int | None
    truncation: Literal["auto", "disabled"]
    top_logprobs: int
    metadata: dict[str, str]
    background: Literal[False]
    service_tier: Literal["default"]
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None


class Response(Settings, Sampling):
    """The answer of POST /v1/responses, with the settings of the request or their defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    completed_at: int | None
    error: ResponseProblem | None
    incomplete_details: ResponseCut | None
    model: str
    store: bool
    """Whether it can be read again by its id."""
    output: list[OutputItem]
    usage: ResponseUsage | None
