"""The forms of responses and their items, for the OpenAPI document; `resource` makes them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from services.frontend.http.responses.tool_schema import (
    AllowedTools,
    CustomChoice,
    CustomTool,
    FunctionChoice,
    NamespaceTool,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class TokenLogprob(BaseModel):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(TokenLogprob):
    """A token of a text, and the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class OutputText(BaseModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty."""
    logprobs: list[TextLogprob]
    """Empty unless `include` asks for them."""


class OutputReasoningText(BaseModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


OutputPart = Annotated[OutputText | OutputReasoningText, Field(discriminator="type")]


class OutputMessage(BaseModel):
    """A message of the model."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(BaseModel):
    """Reasoning of the model, in full; the summary is empty."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[OutputReasoningText]


class OutputCall(BaseModel):
    """A function call of the model, with its arguments as JSON text."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    """The name space of the tool; absent if it has none."""
    arguments: str
    status: ItemStatus


class OutputCustomCall(BaseModel):
    """A call of the model with a text as its input."""

    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    """The name space of the tool; absent if it has none."""
    input: str
    status: ItemStatus


OutputItem = Annotated[
    OutputMessage | OutputReasoning | OutputCall | OutputCustomCall, Field(discriminator="type")
]


class InputTokensDetails(BaseModel):
    """Parts of a prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Parts of an output's tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """The usage in tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseProblem(BaseModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseCut(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class RepeatedTool(BaseModel):
    """A function of the request."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class RepeatedPlainFormat(BaseModel):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class RepeatedSchemaFormat(BaseModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: str
    description: str | None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool


class RepeatedText(BaseModel):
    """Options of the text."""

    format: Annotated[RepeatedPlainFormat | RepeatedSchemaFormat, Field(discriminator="type")]
    verbosity: str


class RepeatedReasoning(BaseModel):
    """Options of the reasoning."""

    effort: str | None
    summary: str | None


class Response(BaseModel):
    """The answer of POST /v1/responses, with the settings of the request or their defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None
    error: ResponseProblem | None
    incomplete_details: ResponseCut | None
    model: str
    instructions: str | None
    previous_response_id: str | None
    tools: list[Annotated[RepeatedTool | CustomTool | NamespaceTool, Field(discriminator="type")]]
    """The tools that the model may get; hosted ones are left out."""
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedTools
    parallel_tool_calls: bool
    text: RepeatedText
    reasoning: RepeatedReasoning
    max_output_tokens: int | None
    max_tool_calls: int | None
    truncation: Literal["auto", "disabled"]
    top_logprobs: int
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    metadata: dict[str, str]
    background: Literal[False]
    service_tier: Literal["default"]
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None
    store: bool
    """Whether it can be read again by its id."""
    output: list[OutputItem]
    usage: ResponseUsage | None
