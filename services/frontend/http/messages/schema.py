"""Request bodies of the Messages API: every field is read or refused, none is ignored.

A text counts as a list of one text block, and a null as an absent field.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from services.frontend.http.inert_fields import CachedBody
from services.frontend.http.request_body import Body
from services.frontend.http.schema import Count, Model, StopString
from services.frontend.pipeline.request import MAX_MESSAGES, MAX_STOP_STRINGS
from services.frontend.pipeline.tools import MAX_TOOLS

MAX_TOOL_NAME_CHARACTERS = 128
_Item = TypeVar("_Item")


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Items = Annotated[list[_Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class TextBlock(CachedBody):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier reply."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Not checked: reasoning is text like any other."""


class ToolUseBlock(CachedBody):
    """An earlier tool call of the model."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]


TextBlocks = Annotated[
    _Items[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | _Items[TextBlock])
]


class ToolResultBlock(CachedBody):
    """The result of an earlier tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks | None = None
    is_error: bool | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]
UserBlocks = Annotated[
    _Items[UserBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | _Items[UserBlock])
]
AssistantBlocks = Annotated[
    _Items[AssistantBlock],
    BeforeValidator(_as_blocks, json_schema_input_type=str | _Items[AssistantBlock]),
]


class UserMessage(Body):
    """A turn of the user, who also brings the results of tools."""

    role: Literal["user"]
    content: UserBlocks


class AssistantMessage(Body):
    """A turn of the model."""

    role: Literal["assistant"]
    content: AssistantBlocks


class SystemMessage(Body):
    """Instructions amid the conversation."""

    role: Literal["system"]
    content: TextBlocks


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class CustomTool(CachedBody):
    """A tool for the model to call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARACTERS)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Either way a call's input streams as the model writes it."""


class ChooseFreely(Body):
    """The model decides whether it calls tools."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class ChooseAny(Body):
    """The model must call a tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ChooseTool(Body):
    """The model must call one tool, once."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class ChooseNone(Body):
    """The model gets no tools."""

    type: Literal["none"]


ToolChoice = Annotated[
    ChooseFreely | ChooseAny | ChooseTool | ChooseNone, Field(discriminator="type")
]


class ThinkingEnabled(Body):
    """The model reasons, within a budget."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1)]


class ThinkingAdaptive(Body):
    """The model reasons as long as it likes."""

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None


class ThinkingDisabled(Body):
    """The model does not reason."""

    type: Literal["disabled"]


Thinking = Annotated[
    ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")
]


class OutputFormat(Body):
    """A schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer, and the effort that goes into it."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(CachedBody):
    """Body of POST /v1/messages/count_tokens."""

    model: Model
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class Metadata(Body):
    """Facts about the request; they change nothing."""

    user_id: str | None = None


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**32 - 1)]
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


TAGS = frozenset(
    {
        *("text", "thinking", "tool_use", "tool_result"),
        *("user", "assistant", "system"),
        *("auto", "any", "tool", "none"),
        *("enabled", "adaptive", "disabled"),
    }
)
"""Names of alternatives, which pydantic puts into the path of an error."""
