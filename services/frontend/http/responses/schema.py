"""Bodies of POST /v1/responses: items, tools and options.

Every field is read, refused, or taken without effect because it cannot change an answer. The last
holds for the `id` and `status` of items that clients send back.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from services.frontend.http.request_body import Body
from services.frontend.http.schema import Count, GenerationFields, JsonSchema
from services.frontend.pipeline.request import MAX_MESSAGES
from services.frontend.pipeline.tools import MAX_TOOLS

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""

_MESSAGE = "message"
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_PARTS = ("input_text", "output_text", "text", "refusal")
_CHOICES = ("auto", "function", "allowed_tools")
_UNTYPED = "untyped"

Label = Annotated[str, Field(max_length=512)]
"""A text that responses repeat."""
Effort = Annotated[str, Field(min_length=1, max_length=64)]


def _as_list(kind: str, entries: Any) -> BeforeValidator:
    """Takes a text for a list of one part or item of the kind; `entries` is the list's type."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if kind == _MESSAGE:
            return [{"type": kind, "role": "user", "content": value}]
        return [{"type": kind, "text": value}]

    return BeforeValidator(read, json_schema_input_type=str | entries)


def _type_of(value: Any) -> str:
    told = value.get("type") if isinstance(value, dict) else None
    return told if isinstance(told, str) else _UNTYPED


def _item_type(value: Any) -> str:
    """Returns the type of an item; a message or reference may leave it out."""
    told = _type_of(value)
    if told == _UNTYPED and isinstance(value, dict) and value.get("type") is None:
        return _MESSAGE if "role" in value else "item_reference" if "id" in value else told
    return told


def _choice_type(value: Any) -> str:
    return "auto" if isinstance(value, str) else _type_of(value)


def _only_functions(value: Any) -> Any:
    if value != "function":
        shown = f"{value:.64}" if isinstance(value, str) else "another type"
        raise PydanticCustomError(
            "octavo_tool_type", "{shown} is not supported here; function is", {"shown": shown}
        )
    return value


class ItemText(Body):
    """Text of a message, of a call's output, or of a message that the model wrote."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=MAX_MESSAGES)] | None = None
    logprobs: list[Any] | None = None


class ItemRefusal(Body):
    """A refusal that a model wrote."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[ItemText | ItemRefusal, Field(discriminator="type")]
_PartList = Annotated[list[Part], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Parts = Annotated[_PartList, _as_list("text", _PartList)]


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


class CallItem(Item):
    """A function call of the model, with its arguments as JSON text."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class CallOutputItem(Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Parts


class ReasoningItem(Item):
    """Reasoning of the model; its content, or else its summary, goes back to the model."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]
Items = Annotated[list[AnyItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class FunctionTool(Body):
    """A function for the model to call."""

    type: Annotated[Literal["function"], BeforeValidator(_only_functions)]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """A function that the model must call, or that it may call."""

    type: Annotated[Literal["function"], BeforeValidator(_only_functions)]
    name: str


class AllowedTools(Body):
    """The tools that the model gets, of all that are listed."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)
    ]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("auto")]
    | Annotated[FunctionChoice, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(_choice_type),
]


class PlainFormat(Body):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """Options of the text."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    """Options of the reasoning, which is always given in full."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class EventOptions(Body):
    """Options of a stream; events are never padded."""

    include_obfuscation: bool | None = None


class ResponsesRequest(GenerationFields):
    """Body of POST /v1/responses."""

    input: Annotated[Items, _as_list(_MESSAGE, Items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_reasoning_tokens: Count | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(max_length=16),
        ]
        | None
    ) = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Literal[False] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """A limit of tools that the server runs; it runs none."""
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    stream_options: EventOptions | None = None
    user: Label | None = None


TAGS = frozenset((*_ITEMS, *_PARTS, *_CHOICES))
"""Names of alternatives, which pydantic puts into the path of an error."""
