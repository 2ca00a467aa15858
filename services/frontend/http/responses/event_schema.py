"""Events of a response: their types, from which OpenAPI's schemas come."""

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

from services.frontend.http.responses.answer_schema import (
    OutputItem,
    OutputPart,
    Response,
    TextLogprob,
)

Stage = Literal[
    "response.created",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]
ItemStage = Literal["response.output_item.added", "response.output_item.done"]
PartStage = Literal["response.content_part.added", "response.content_part.done"]


class NumberedEvent(TypedDict):
    """An event with its number, from 0."""

    sequence_number: int


class ResponseStage(NumberedEvent):
    """A stage in the life of the response."""

    type: Stage
    response: Response


class ItemEvent(NumberedEvent):
    """The beginning or end of an item."""

    type: ItemStage
    output_index: int
    item: OutputItem


class EventInItem(NumberedEvent):
    """An event inside an item."""

    item_id: str
    output_index: int


class EventInPart(EventInItem):
    """An event inside a part of an item."""

    content_index: int


class PartEvent(EventInPart):
    """The beginning or end of a part."""

    type: PartStage
    part: OutputPart


class TextDelta(EventInPart):
    """More text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[TextLogprob]


class TextDone(EventInPart):
    """The whole text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[TextLogprob]


class ReasoningDelta(EventInPart):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(EventInPart):
    """The whole reasoning."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(EventInItem):
    """More of the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(EventInItem):
    """All the arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class InputDelta(EventInItem):
    """More of the input of a custom tool's call."""

    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class InputDone(EventInItem):
    """All the input of a custom tool's call."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str


ResponseEvent = TypeAliasType(
    "ResponseEvent",
    Annotated[
        ResponseStage
        | ItemEvent
        | PartEvent
        | TextDelta
        | TextDone
        | ReasoningDelta
        | ReasoningDone
        | ArgumentsDelta
        | ArgumentsDone
        | InputDelta
        | InputDone,
        Field(discriminator="type"),
    ],
)
"""The data of one event of a streamed response."""
