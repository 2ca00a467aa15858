"""Messages and their content in bodies of the Messages API.

A text counts as a list of one text block, and a null as an absent field.
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from services.frontend.http.fields.body import TAKEN, Body, OpenBody
from services.frontend.http.fields.inert import CachedBody
from services.frontend.pipeline.request import MAX_MESSAGES

_Item = TypeVar("_Item")


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Items = Annotated[list[_Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class TextBlock(CachedBody):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any] | None, TAKEN] = None


class ImageSource(Body):
    """An image: base64, or where to fetch it."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    """The file itself says what it is."""
    data: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if (self.data is None) == (self.type == "base64"):
            raise ValueError("data must be given with the type base64, and only then")
        if (self.url is None) == (self.type == "url"):
            raise ValueError("url must be given with the type url, and only then")
        return self


class ImageBlock(CachedBody):
    """An image."""

    type: Literal["image"]
    source: ImageSource


class ThinkingBlock(Body):
    """Reasoning of an earlier reply."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Not checked: reasoning is text like any other."""


class RedactedThinkingBlock(Body):
    """Encrypted reasoning of an earlier reply by another server, which alone can read it."""

    type: Annotated[Literal["redacted_thinking"], TAKEN]
    data: str


class HostedBlock(OpenBody):
    """A use of a hosted tool in an earlier reply by another server, or its result."""

    type: Annotated[
        Literal[
            "server_tool_use",
            "web_search_tool_result",
            "web_fetch_tool_result",
            "code_execution_tool_result",
            "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result",
            "tool_search_tool_result",
            "advisor_tool_result",
            "mcp_tool_use",
            "mcp_tool_result",
        ],
        TAKEN,
    ]


class ToolUseBlock(CachedBody):
    """An earlier tool call of the model."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any] | None = None
    caller: Annotated[dict[str, Any] | None, TAKEN] = None


class ToolReferenceBlock(CachedBody):
    """A tool that a search for tools has found; the model has it already."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """The reference as the model sees it."""
        return f"{self.tool_name}\n"


TextBlocks = Annotated[
    _Items[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | _Items[TextBlock])
]
ResultBlock = Annotated[TextBlock | ImageBlock | ToolReferenceBlock, Field(discriminator="type")]
ResultBlocks = Annotated[
    _Items[ResultBlock],
    BeforeValidator(_as_blocks, json_schema_input_type=str | _Items[ResultBlock]),
]


class ToolResultBlock(CachedBody):
    """The result of an earlier tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultBlocks | None = None
    is_error: bool | None = None


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | HostedBlock,
    Field(discriminator="type"),
]
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
