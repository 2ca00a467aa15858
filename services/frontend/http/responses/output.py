"""The output items of a response, and the events that build them."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.engine_client.messages import STOP
from services.frontend.http.answers.logprobs import ChatLogprobs
from services.frontend.http.responses.offered_tools import CallName, custom_input
from services.frontend.pipeline.request import Output
from services.frontend.reply.deltas import CallPiece

Event = dict[str, Any]
"""An event without its sequence number."""


@dataclass(frozen=True, slots=True)
class TextKind:
    """A kind of item with one part of text."""

    item: str
    id_prefix: str
    part: str
    event: str
    """The beginning of the names of its events."""


MESSAGE = TextKind("message", "msg_", "output_text", "response.output_text")
REASONING = TextKind("reasoning", "rs_", "reasoning_text", "response.reasoning_text")


class TextItem:
    """A message, or reasoning."""

    def __init__(self, kind: TextKind, index: int) -> None:
        """Starts without text."""
        self.kind = kind
        self._index = index
        self._id = kind.id_prefix + uuid.uuid4().hex
        self._place = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def opening(self) -> list[Event]:
        """Returns the events that begin it."""
        item: dict[str, Any] = {**self._item("in_progress"), "content": []}
        return [
            {"type": "response.output_item.added", "output_index": self._index, "item": item},
            {"type": "response.content_part.added", **self._place, "part": self._part()},
        ]

    def push(self, text: str, logprobs: Sequence[Any]) -> Event:
        """Adds text with the log-probabilities of its tokens; returns the event."""
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        told = {"logprobs": list(logprobs)} if self.kind is MESSAGE else {}
        return {"type": f"{self.kind.event}.delta", **self._place, "delta": text, **told}

    def closing(self, status: str) -> list[Event]:
        """Returns the events that end it."""
        part, item = self._part(), self.whole(status)
        told = {"logprobs": self._logprobs} if self.kind is MESSAGE else {}
        return [
            {"type": f"{self.kind.event}.done", **self._place, "text": part["text"], **told},
            {"type": "response.content_part.done", **self._place, "part": part},
            {"type": "response.output_item.done", "output_index": self._index, "item": item},
        ]

    def whole(self, status: str) -> dict[str, Any]:
        """Returns the item as it is now."""
        return {**self._item(status), "content": [self._part()]}

    def _item(self, status: str) -> dict[str, Any]:
        own: dict[str, Any] = {"summary": []}
        if self.kind is MESSAGE:
            own = {"role": "assistant"}
        return {"type": self.kind.item, "id": self._id, "status": status, **own}

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.kind.part, "text": "".join(self._texts)}
        if self.kind is MESSAGE:
            part |= {"annotations": [], "logprobs": list(self._logprobs)}
        return part


class FunctionCallItem:
    """A function call."""

    def __init__(self, call: CallPiece, name: CallName, index: int) -> None:
        """Starts without arguments."""
        self._call = call
        self._name = name
        self._index = index
        self._id = f"fc_{uuid.uuid4().hex}"
        self._place = {"item_id": self._id, "output_index": index}
        self._arguments: list[str] = []

    def opening(self) -> list[Event]:
        """Returns the events that begin it."""
        item = self.whole("in_progress")
        return [{"type": "response.output_item.added", "output_index": self._index, "item": item}]

    def push(self, arguments: str) -> list[Event]:
        """Adds to the arguments; returns the events."""
        self._arguments.append(arguments)
        told = "response.function_call_arguments.delta"
        return [{"type": told, **self._place, "delta": arguments}]

    def closing(self, status: str) -> list[Event]:
        """Returns the events that end it."""
        item = self.whole(status)
        return [
            {
                "type": "response.function_call_arguments.done",
                **self._place,
                "name": item["name"],
                "arguments": item["arguments"],
            },
            {"type": "response.output_item.done", "output_index": self._index, "item": item},
        ]

    def whole(self, status: str) -> dict[str, Any]:
        """Returns the item as it is now."""
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._call.call_id,
            **_named(self._name),
            "arguments": "".join(self._arguments),
            "status": status,
        }


class CustomCallItem:
    """A call with a text as its input, which is complete only at its end."""

    def __init__(
        self, call_id: str, name: CallName, index: int, *, read: Callable[[str], str]
    ) -> None:
        """Starts without input; `read` returns the input in what the model wrote."""
        self._call_id = call_id
        self._name = name
        self._index = index
        self._read = read
        self._id = f"ctc_{uuid.uuid4().hex}"
        self._place = {"item_id": self._id, "output_index": index}
        self._pieces: list[str] = []

    def opening(self) -> list[Event]:
        """Returns the events that begin it."""
        item = self.whole("in_progress")
        return [{"type": "response.output_item.added", "output_index": self._index, "item": item}]

    def push(self, text: str) -> list[Event]:
        """Adds to what the model wrote; returns no events."""
        self._pieces.append(text)
        return []

    def closing(self, status: str) -> list[Event]:
        """Returns the events that end it."""
        item = self.whole(status)
        event = "response.custom_tool_call_input"
        return [
            {"type": f"{event}.delta", **self._place, "delta": item["input"]},
            {"type": f"{event}.done", **self._place, "input": item["input"]},
            {"type": "response.output_item.done", "output_index": self._index, "item": item},
        ]

    def whole(self, status: str) -> dict[str, Any]:
        """Returns the item as it is now."""
        return {
            "type": "custom_tool_call",
            "id": self._id,
            "call_id": self._call_id,
            **_named(self._name),
            "input": self._read("".join(self._pieces)) if self._pieces else "",
            "status": status,
        }


CallItem = FunctionCallItem | CustomCallItem


class OutputItems:
    """Builds the items of one response from its output."""

    def __init__(
        self,
        logprobs: ChatLogprobs | None,
        *,
        names: Mapping[str, CallName] | None = None,
        demanded: CallName | None = None,
    ) -> None:
        """Starts without items.

        Args:
            logprobs: gives messages log-probabilities.
            names: the caller's names of tools by the model's.
            demanded: the custom tool whose input the text is.
        """
        self._logprobs = logprobs
        self._names = names or {}
        self._demanded = demanded
        self._waiting_logprobs: list[Any] = []
        """Log-probabilities of tokens whose text is still to come."""
        self._open: TextItem | CallItem | None = None
        self._done: list[dict[str, Any]] = []

    def push(self, output: Output) -> list[Event]:
        """Adds new output and returns its events, those of the end included."""
        self._keep_logprobs(output)
        events: list[Event] = []
        # Arguments of a call that has begun precede all other output.
        for call in output.calls:
            if not call.call_id:
                assert isinstance(self._open, CallItem), "its first piece has opened it"
                events += self._open.push(call.arguments)
        if output.reasoning:
            events += self._add_text(REASONING, output.reasoning, ())
        if output.text:
            logprobs, self._waiting_logprobs = self._waiting_logprobs, []
            if self._demanded is not None:
                events += self._add_input(self._demanded, output.text)
            else:
                events += self._add_text(MESSAGE, output.text, logprobs)
        for call in output.calls:
            if call.call_id:
                events += self._add_call(call)
        if output.finish_reason is not None:
            events += self._end(is_cut=output.finish_reason != STOP)
        return events

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns the items so far; one that is not done is incomplete."""
        return self._done if self._open is None else [*self._done, self._open.whole("incomplete")]

    def _keep_logprobs(self, output: Output) -> None:
        """Keeps the log-probabilities of a message's tokens."""
        if self._logprobs is not None:
            self._waiting_logprobs += self._logprobs.push(output)["content"]
        if not output.text and (output.reasoning or output.calls):
            self._waiting_logprobs = []

    def _add_text(self, kind: TextKind, text: str, logprobs: Sequence[Any]) -> list[Event]:
        item, events = self._open, []
        if not isinstance(item, TextItem) or item.kind is not kind:
            item = TextItem(kind, self._next_index)
            events = self._begin(item)
        return [*events, item.push(text, logprobs)]

    def _add_input(self, name: CallName, text: str) -> list[Event]:
        """Adds to the input of the custom tool that the reply is for."""
        item, events = self._open, []
        if not isinstance(item, CustomCallItem):
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            item = CustomCallItem(call_id, name, self._next_index, read=str)
            events = self._begin(item)
        return [*events, *item.push(text)]

    def _add_call(self, call: CallPiece) -> list[Event]:
        name = self._names.get(call.name) or CallName(call.name)
        item: CallItem = FunctionCallItem(call, name, self._next_index)
        if name.is_custom:
            item = CustomCallItem(call.call_id, name, self._next_index, read=custom_input)
        events = self._begin(item)
        return [*events, *item.push(call.arguments)] if call.arguments else events

    def _begin(self, item: TextItem | CallItem) -> list[Event]:
        events = self._close("completed")
        self._open = item
        return events + item.opening()

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        self._done.append(item.whole(status))
        return item.closing(status)

    def _end(self, *, is_cut: bool) -> list[Event]:
        """Ends the last item; a reply without text or calls is an empty message."""
        events: list[Event] = []
        if self._open is None:
            events = self._begin(TextItem(MESSAGE, 0))
        return events + self._close("incomplete" if is_cut else "completed")

    @property
    def _next_index(self) -> int:
        return len(self._done) + (self._open is not None)


def _named(name: CallName) -> dict[str, str]:
    """Returns the fields with a tool's names."""
    space = {} if name.namespace is None else {"namespace": name.namespace}
    return {"name": name.name, **space}
