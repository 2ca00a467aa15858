"""The forms of answers of the Messages API, for the OpenAPI document; `answer` makes them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel


class ReplyText(BaseModel):
    """Text of the model."""

    type: Literal["text"]
    text: str


class ReplyThinking(BaseModel):
    """Reasoning of the model, empty where it is not to be shown; the signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ReplyToolUse(BaseModel):
    """A tool call of the model; in a stream, its input is empty until its deltas come."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ReplyBlock = Annotated[ReplyText | ReplyThinking | ReplyToolUse, Field(discriminator="type")]


class MessageUsage(BaseModel):
    """The usage in tokens; input tokens are the uncached ones."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageEnding(BaseModel):
    """Why a reply ended; null until it does."""

    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None


class AppliedEdit(BaseModel):
    """An edit of the conversation, and how much it has cleared."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919"]
    cleared_thinking_turns: int | None = None
    cleared_tool_uses: int | None = None
    cleared_input_tokens: int


class AppliedEdits(BaseModel):
    """The edits of the conversation that have changed it."""

    applied_edits: list[AppliedEdit]


class ReplyMessage(MessageEnding):
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    usage: MessageUsage
    context_management: AppliedEdits | None = None
    """Present if the request has it; not in `message_start`."""


class ProblemDetails(BaseModel):
    """The name of a mistake that clients know how to mend."""

    error_code: str


class MessageProblem(BaseModel):
    """The kind of an error, and its text."""

    type: str
    message: str
    details: ProblemDetails | None = None


class MessageError(BaseModel):
    """An error, as a body or as the last event of a stream."""

    type: Literal["error"]
    error: MessageProblem
    request_id: str | None = None
    """Absent where a request was refused before it had one."""


class MessageStart(BaseModel):
    """The first event: a reply without content."""

    type: Literal["message_start"]
    message: ReplyMessage


class MessagePing(BaseModel):
    """An event without content."""

    type: Literal["ping"]


class BlockStart(BaseModel):
    """The beginning of a block."""

    type: Literal["content_block_start"]
    index: int
    content_block: ReplyBlock


class ReplyTextDelta(BaseModel):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ReplyThinkingDelta(BaseModel):
    """More reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class ReplyInputDelta(BaseModel):
    """More of the input of a tool call, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(BaseModel):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[
        ReplyTextDelta | ReplyThinkingDelta | ReplyInputDelta, Field(discriminator="type")
    ]


class BlockStop(BaseModel):
    """The end of a block."""

    type: Literal["content_block_stop"]
    index: int


class MessageDelta(BaseModel):
    """The end of the reply, with the usage of the whole."""

    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage
    context_management: AppliedEdits | None = None


class MessageStop(BaseModel):
    """The last event."""

    type: Literal["message_stop"]


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart
            | MessagePing
            | BlockStart
            | BlockDelta
            | BlockStop
            | MessageDelta
            | MessageStop
            | MessageError,
            Field(discriminator="type"),
        ]
    ]
):
    """The data of one event of a streamed reply."""
