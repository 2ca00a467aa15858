"""The forms of answers, for the OpenAPI document; the endpoints make them."""

from typing import Any, Literal

from pydantic import BaseModel

StopReason = str | int | None
"""The stop string, or the stop token of the request itself, that ended an output."""


class PromptTokensDetails(BaseModel):
    """Parts of a prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Parts of an output's tokens."""

    reasoning_tokens: int


class Usage(BaseModel):
    """The usage in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    """Both are known at the end."""


class CompletionChoice(BaseModel):
    """One output of a completion, or new output in a chunk."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(BaseModel):
    """The answer of POST /v1/completions, and the data of its events."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    """Null, or absent, in chunks of a stream that does not have it."""


class CalledFunction(BaseModel):
    """The function of a tool call, or the new part of its arguments."""

    name: str | None = None
    arguments: str


class CalledTool(BaseModel):
    """A tool call; `index` is in chunks."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class AnswerMessage(BaseModel):
    """A message of the model, or its new part."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    refusal: None = None


class ChatChoice(BaseModel):
    """One output of a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: StopReason = None


class ChatCompletion(BaseModel):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ChatChunkChoice(BaseModel):
    """New output of a chat completion."""

    index: int
    delta: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: StopReason = None


class ChatCompletionChunk(BaseModel):
    """The data of one event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    chat_template_error: str | None = None


class ModelList(BaseModel):
    """The models that are served: one, or none before the first contact with an engine."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    """The text of token ids."""

    prompt: str


class CountAnswer(BaseModel):
    """The number of tokens of a conversation."""

    input_tokens: int


class DeletedResponse(BaseModel):
    """A stored response that was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(BaseModel):
    """The number of tokens of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItemList(BaseModel):
    """A page of the items that led to a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VersionAnswer(BaseModel):
    """The version of the frontend."""

    version: str


class ProcessCounts(BaseModel):
    """How many of the frontend's processes serve."""

    serving: int
    total: int


class HealthAnswer(BaseModel):
    """Whether requests are taken."""

    status: Literal["ok", "unavailable"]
    processes: ProcessCounts | None = None
