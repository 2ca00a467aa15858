"""Request bodies of the Messages API.

Every field is read, taken without effect where it says so, or refused by name.

A null counts as an absent field.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from services.frontend.http.fields.body import TAKEN, Body, OpenBody
from services.frontend.http.fields.generation import Count, Model, StopString
from services.frontend.http.fields.inert import CachedBody
from services.frontend.http.messages.content_schema import Message, TextBlocks
from services.frontend.http.messages.edit_schema import ContextManagement
from services.frontend.pipeline.request import MAX_MESSAGES, MAX_STOP_STRINGS
from services.frontend.pipeline.tools import MAX_TOOLS

MAX_TOOL_NAME_CHARACTERS = 128


class MessageTool(CachedBody):
    """A tool for the model to call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARACTERS)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Either way a call's input streams as the model writes it."""
    input_examples: list[dict[str, Any]] | None = None
    """Shown with the description."""
    defer_loading: Annotated[bool | None, TAKEN] = None
    """The model has every tool from the start: nothing here searches for tools."""
    allowed_callers: Annotated[list[str] | None, TAKEN] = None


class VendorTool(OpenBody, CachedBody):
    """A tool of a type that the vendor defines, with options of its own."""

    type: Annotated[str, Field(max_length=MAX_TOOL_NAME_CHARACTERS)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARACTERS)] | None = None


def _tag_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "vendor"


AnyTool = Annotated[
    Annotated[MessageTool, Tag("custom")] | Annotated[VendorTool, Tag("vendor")],
    Discriminator(_tag_of_tool),
]


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


class ShownThinking(Body):
    """How a reply shows its thinking."""

    display: Literal["summarized", "omitted", "updates"] | None = None
    """`omitted` leaves the text of its blocks out; otherwise it is given in full."""
    block_binding: Annotated[dict[str, Any] | None, TAKEN] = None


class ThinkingEnabled(ShownThinking):
    """The model reasons, within a budget."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1)]


class ThinkingAdaptive(ShownThinking):
    """The model reasons as long as it likes."""

    type: Literal["adaptive"]


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
    task_budget: Annotated[dict[str, Any] | None, TAKEN] = None


class CountTokensRequest(CachedBody):
    """Body of POST /v1/messages/count_tokens."""

    model: Model
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: Annotated[ContextManagement | None, TAKEN] = None
    """Applied, so only --strict-fields refuses it, as servers without it do."""
    mcp_servers: list[dict[str, Any]] | None = None
    thread: dict[str, Any] | None = None
    betas: Annotated[list[str] | None, TAKEN] = None
    speed: Annotated[str | None, TAKEN] = None


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
    output_format: OutputFormat | None = None
    """An earlier name of `output_config.format`."""
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Annotated[str | None, TAKEN] = None
    inference_geo: Annotated[str | None, TAKEN] = None
    diagnostics: Annotated[dict[str, Any] | None, TAKEN] = None
    fallbacks: Annotated[list[dict[str, Any]] | None, TAKEN] = None
    fallback_credit_token: Annotated[str | dict[str, Any] | None, TAKEN] = None
    user_profile_id: Annotated[str | None, TAKEN] = None
    workspace_id: Annotated[str | None, TAKEN] = None


TAGS = frozenset(
    {
        *("text", "image", "thinking", "redacted_thinking"),
        *("tool_use", "tool_result", "tool_reference"),
        *("vendor", "clear_thinking_20251015", "clear_tool_uses_20250919", "input_tokens"),
        *("user", "assistant", "system"),
        *("auto", "any", "tool", "none"),
        *("enabled", "adaptive", "disabled"),
    }
)
"""Names of alternatives, which pydantic puts into the path of an error."""
