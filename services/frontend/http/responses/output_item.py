"""One output item of a response, and the events that build it."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, Literal, TypeVar

from services.frontend.http.responses.answer_schema import (
    ItemStatus,
    OutputItem,
    OutputReasoningText,
    OutputText,
    TextLogprob,
    ToolNames,
)
from services.frontend.http.responses.event_schema import (
    ArgumentsDone,
    EventInItem,
    EventInPart,
    InputDelta,
    InputDone,
    ItemEvent,
    ItemStage,
    PartEvent,
    PartStage,
    ReasoningDelta,
    ReasoningDone,
    ResponseEvent,
    TextDelta,
    TextDone,
)
from services.frontend.http.responses.offered_tools import CallName, custom_input

Events = list[ResponseEvent]
Part = TypeVar("Part", OutputText, OutputReasoningText)


class Item(ABC):
    """One output item, from its first event to its last."""

    id_prefix: ClassVar[str]

    def __init__(self, index: int, numbers: Iterator[int]) -> None:
        """Starts without content; `numbers` are those of the response's next events."""
        self._id = f"{self.id_prefix}_{uuid.uuid4().hex}"
        self._index = index
        self._numbers = numbers
        self._pieces: list[str] = []

    def opening(self) -> Events:
        """Returns the events that begin it."""
        return [self._item_event("response.output_item.added", self.whole("in_progress"))]

    def closing(self, status: ItemStatus) -> Events:
        """Returns the events that end it."""
        events = self._content_done()
        return [*events, self._item_event("response.output_item.done", self.whole(status))]

    @abstractmethod
    def whole(self, status: ItemStatus) -> OutputItem:
        """Returns the item as it is now."""

    @abstractmethod
    def _content_done(self) -> Events: ...

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def _in_item(self) -> EventInItem:
        number = next(self._numbers)
        return {"sequence_number": number, "item_id": self._id, "output_index": self._index}

    def _item_event(self, kind: ItemStage, item: OutputItem) -> ItemEvent:
        number = next(self._numbers)
        return {"type": kind, "sequence_number": number, "output_index": self._index, "item": item}


class TextItem(Item, Generic[Part]):
    """An item with one part of text."""

    def opening(self) -> Events:
        """Returns the events that begin it."""
        added = self._item_event("response.output_item.added", self._item("in_progress", []))
        return [added, self._part_event("response.content_part.added")]

    def whole(self, status: ItemStatus) -> OutputItem:
        """Returns the item as it is now."""
        return self._item(status, [self._part()])

    @abstractmethod
    def _item(self, status: ItemStatus, content: list[Part]) -> OutputItem: ...

    @abstractmethod
    def _part(self) -> Part: ...

    def _in_part(self) -> EventInPart:
        return {**self._in_item(), "content_index": 0}

    def _part_event(self, kind: PartStage) -> PartEvent:
        return {"type": kind, **self._in_part(), "part": self._part()}


class MessageItem(TextItem[OutputText]):
    """A message."""

    id_prefix = "msg"

    def __init__(self, index: int, numbers: Iterator[int]) -> None:
        """Starts without text."""
        super().__init__(index, numbers)
        self._logprobs: list[TextLogprob] = []

    def push(self, text: str, logprobs: Sequence[TextLogprob]) -> TextDelta:
        """Adds text with the log-probabilities of its tokens; returns the event."""
        self._pieces.append(text)
        self._logprobs.extend(logprobs)
        return {
            "type": "response.output_text.delta",
            **self._in_part(),
            "delta": text,
            "logprobs": list(logprobs),
        }

    def _content_done(self) -> Events:
        done: TextDone = {
            "type": "response.output_text.done",
            **self._in_part(),
            "text": self._text,
            "logprobs": self._logprobs,
        }
        return [done, self._part_event("response.content_part.done")]

    def _item(self, status: ItemStatus, content: list[OutputText]) -> OutputItem:
        return {
            "type": "message",
            "id": self._id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _part(self) -> OutputText:
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }


class ReasoningItem(TextItem[OutputReasoningText]):
    """Reasoning."""

    id_prefix = "rs"

    def push(self, text: str) -> ReasoningDelta:
        """Adds text; returns the event."""
        self._pieces.append(text)
        return {"type": "response.reasoning_text.delta", **self._in_part(), "delta": text}

    def _content_done(self) -> Events:
        done: ReasoningDone = {
            "type": "response.reasoning_text.done",
            **self._in_part(),
            "text": self._text,
        }
        return [done, self._part_event("response.content_part.done")]

    def _item(self, status: ItemStatus, content: list[OutputReasoningText]) -> OutputItem:
        return {
            "type": "reasoning",
            "id": self._id,
            "status": status,
            "summary": [],
            "content": content,
        }

    def _part(self) -> OutputReasoningText:
        return {"type": "reasoning_text", "text": self._text}


class CallItem(Item):
    """A call of a tool."""

    def __init__(self, call_id: str, name: CallName, index: int, numbers: Iterator[int]) -> None:
        """Starts without arguments."""
        super().__init__(index, numbers)
        self._call_id = call_id
        self._names: ToolNames = {"name": name.name}
        if name.namespace is not None:
            self._names["namespace"] = name.namespace

    @abstractmethod
    def push(self, text: str) -> Events:
        """Adds to what the model wrote; returns the events."""


class FunctionCallItem(CallItem):
    """A function call."""

    id_prefix = "fc"

    def push(self, text: str) -> Events:
        """Adds to the arguments; returns the event."""
        self._pieces.append(text)
        kind: Literal["response.function_call_arguments.delta"]
        kind = "response.function_call_arguments.delta"
        return [{"type": kind, **self._in_item(), "delta": text}]

    def _content_done(self) -> Events:
        done: ArgumentsDone = {
            "type": "response.function_call_arguments.done",
            **self._in_item(),
            "name": self._names["name"],
            "arguments": self._text,
        }
        return [done]

    def whole(self, status: ItemStatus) -> OutputItem:
        """Returns the item as it is now."""
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._call_id,
            **self._names,
            "arguments": self._text,
            "status": status,
        }


class CustomCallItem(CallItem):
    """A call with a text as its input, which is complete only at its end."""

    id_prefix = "ctc"
    reads_arguments = True
    """Whether the model writes the input in the arguments of a function."""

    def push(self, text: str) -> Events:
        """Adds to what the model wrote; returns no events."""
        self._pieces.append(text)
        return []

    def _content_done(self) -> Events:
        delta: InputDelta = {
            "type": "response.custom_tool_call_input.delta",
            **self._in_item(),
            "delta": self._input,
        }
        done: InputDone = {
            "type": "response.custom_tool_call_input.done",
            **self._in_item(),
            "input": self._input,
        }
        return [delta, done]

    def whole(self, status: ItemStatus) -> OutputItem:
        """Returns the item as it is now."""
        return {
            "type": "custom_tool_call",
            "id": self._id,
            "call_id": self._call_id,
            **self._names,
            "input": self._input,
            "status": status,
        }

    @property
    def _input(self) -> str:
        is_read = self.reads_arguments and self._pieces
        return custom_input(self._text) if is_read else self._text


class DemandedCallItem(CustomCallItem):
    """A call whose input is all that the model writes."""

    reads_arguments = False
