"""Items of requests for responses.

Every field is read, refused, or taken without effect because it cannot change an answer. The last
holds for the `id` and `status` of items that clients send back.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from services.frontend.http.fields.body import TAKEN, Body
from services.frontend.http.fields.images import Detail
from services.frontend.http.responses.tool_schema import type_of
from services.frontend.pipeline.request import MAX_MESSAGES

MESSAGE = "message"
_FOREIGN = "calls of other tools"
_PARTS = ("input_text", "output_text", "text", "input_image", "refusal")

ForeignType = Literal[
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
]
_FOREIGN_TYPES = frozenset(ForeignType.__args__)  # type: ignore[attr-defined]  # a Literal's values


def as_list(kind: str, entries: Any) -> BeforeValidator:
    """Takes a text for a list of one part or item of the kind; `entries` is the list's type."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if kind == MESSAGE:
            return [{"type": kind, "role": "user", "content": value}]
        return [{"type": kind, "text": value}]

    return BeforeValidator(read, json_schema_input_type=str | entries)


def _item_type(value: Any) -> str:
    """Returns the type of an item; a message or reference may leave it out."""
    if isinstance(value, dict) and value.get("type") is None:
        return MESSAGE if "role" in value else "item_reference" if "id" in value else type_of(value)
    told = type_of(value)
    return _FOREIGN if told in _FOREIGN_TYPES else told


class ItemText(Body):
    """Text of a message, of a call's output, or of a message that the model wrote."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=MAX_MESSAGES)] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, TAKEN] = None


class ItemImage(Body):
    """An image of the user, or in a call's output: a data: URL, or where to fetch it."""

    type: Literal["input_image"]
    image_url: str
    detail: Detail | None = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, TAKEN] = None


class ItemRefusal(Body):
    """A refusal that a model wrote."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[ItemText | ItemImage | ItemRefusal, Field(discriminator="type")]
_PartList = Annotated[list[Part], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Parts = Annotated[_PartList, as_list("text", _PartList)]


class ReasoningText(Body):
    """Reasoning, or a summary of it."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class Item(Body):
    """An item; answers carry these fields, which say nothing to a model."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = None
    end_turn: Annotated[bool | None, TAKEN] = None


class AnyCallItem(Item):
    """A call of the model."""

    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    namespace: str | None = None
    caller: Annotated[dict[str, Any] | None, TAKEN] = None


class CallItem(AnyCallItem):
    """A function call of the model, with its arguments as JSON text; no text is no arguments."""

    type: Literal["function_call"]
    arguments: str | None = None


class CustomCallItem(AnyCallItem):
    """A call of the model with a text as its input."""

    type: Literal["custom_tool_call"]
    input: str


class CallOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Parts
    name: Annotated[str | None, TAKEN] = None
    namespace: Annotated[str | None, TAKEN] = None
    caller: Annotated[dict[str, Any] | None, TAKEN] = None


class ReasoningItem(Item):
    """Reasoning of the model; its content, or else its summary, goes back to the model."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Annotated[str | None, TAKEN] = None
    """Only the server that wrote it can read it."""

    @property
    def text(self) -> str:
        """The readable part."""
        return "".join(part.text for part in self.content or self.summary or ())


class ForeignItem(BaseModel):
    """A call of a tool that is not served, or its result, from a conversation begun elsewhere."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    type: ForeignType
    id: str | None = None
    call_id: str | None = None

    @field_validator("type")
    @classmethod
    def _refuse_if_strict(cls, value: str, info: ValidationInfo) -> str:
        if info.context:
            raise PydanticCustomError("octavo_foreign_item", f"{value} is not supported")
        return value


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ForeignItem, Tag(_FOREIGN)],
    Discriminator(_item_type),
]
Items = Annotated[list[AnyItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]

ITEM_TAGS = frozenset(
    (
        *_PARTS,
        "message",
        "function_call",
        "custom_tool_call",
        "function_call_output",
        "custom_tool_call_output",
        "reasoning",
        _FOREIGN,
    )
)
"""Names of alternatives, which pydantic puts into the path of an error."""
