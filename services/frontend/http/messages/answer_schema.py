"""Answers of the Messages API: their types, from which OpenAPI's schemas come."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

from services.frontend.http.answers.weights import WeightsField
from services.frontend.http.messages.errors import MessageError


class ClearedTokens(TypedDict):
    """The size of a conversation before its edits."""

    original_input_tokens: int


class CountAnswer(TypedDict):
    """The number of tokens of a conversation."""

    input_tokens: int
    context_management: NotRequired[ClearedTokens]
    """Present if the request has it."""


class ReplyText(TypedDict):
    """Text of the model."""

    type: Literal["text"]
    text: str


class ReplyThinking(TypedDict):
    """Reasoning of the model, empty where it is not to be shown; the signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ReplyToolUse(TypedDict):
    """A tool call of the model; in a stream, its input is empty until its deltas come."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ReplyBlock = Annotated[ReplyText | ReplyThinking | ReplyToolUse, Field(discriminator="type")]


class MessageUsage(WeightsField):
    """The usage in tokens; input tokens are the uncached ones."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageEnding(TypedDict):
    """Why a reply ended; null until it does."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class AppliedEdit(TypedDict):
    """An edit of the conversation, and how much it has cleared."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919"]
    cleared_thinking_turns: NotRequired[int]
    cleared_tool_uses: NotRequired[int]
    cleared_input_tokens: int


class AppliedEdits(TypedDict):
    """The edits of the conversation that have changed it."""

    applied_edits: list[AppliedEdit]


class EditsField(TypedDict, total=False):
    """Field that is present if the request has it; not in `message_start`."""

    context_management: AppliedEdits


class ReplyMessage(MessageEnding, EditsField):
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    usage: MessageUsage


class MessageStart(TypedDict):
    """The first event: a reply without content."""

    type: Literal["message_start"]
    message: ReplyMessage


class MessagePing(TypedDict):
    """An event without content."""

    type: Literal["ping"]


class BlockStart(TypedDict):
    """The beginning of a block."""

    type: Literal["content_block_start"]
    index: int
    content_block: ReplyBlock


class ReplyTextDelta(TypedDict):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ReplyThinkingDelta(TypedDict):
    """More reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class ReplyInputDelta(TypedDict):
    """More of the input of a tool call, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


BlockMore = Annotated[
    ReplyTextDelta | ReplyThinkingDelta | ReplyInputDelta, Field(discriminator="type")
]


class BlockDelta(TypedDict):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: BlockMore


class BlockStop(TypedDict):
    """The end of a block."""

    type: Literal["content_block_stop"]
    index: int


class MessageDelta(EditsField):
    """The end of the reply, with the usage of the whole."""

    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


MessageEvent = TypeAliasType(
    "MessageEvent",
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
    ],
)
"""The data of one event of a streamed reply."""
