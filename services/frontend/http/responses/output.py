"""Builds the output items of a response from its outputs."""

import uuid
from collections.abc import Iterator, Mapping
from itertools import count

from services.frontend.engine_client.messages import STOP
from services.frontend.http.answers.logprobs import ChatLogprobs
from services.frontend.http.responses.answer_schema import ItemStatus, OutputItem, TextLogprob
from services.frontend.http.responses.offered_tools import CallName
from services.frontend.http.responses.output_item import (
    CallItem,
    CustomCallItem,
    DemandedCallItem,
    Events,
    FunctionCallItem,
    MessageItem,
    ReasoningItem,
)
from services.frontend.pipeline.request import Output
from services.frontend.reply.deltas import CallPiece


class OutputItems:
    """Builds the items of one response from its output."""

    def __init__(
        self,
        logprobs: ChatLogprobs | None,
        *,
        numbers: Iterator[int] | None = None,
        names: Mapping[str, CallName] | None = None,
        demanded: CallName | None = None,
    ) -> None:
        """Starts without items.

        Args:
            logprobs: gives messages log-probabilities.
            numbers: the numbers of the response's next events; from 0 if it is None.
            names: the caller's names of tools by the model's.
            demanded: the custom tool whose input the text is.
        """
        self._logprobs = logprobs
        self._numbers = count() if numbers is None else numbers
        self._names = names or {}
        self._demanded = demanded
        self._waiting_logprobs: list[TextLogprob] = []
        """Log-probabilities of tokens whose text is still to come."""
        self._open: MessageItem | ReasoningItem | CallItem | None = None
        self._done: list[OutputItem] = []

    def push(self, output: Output) -> Events:
        """Adds new output and returns its events, those of the end included."""
        self._keep_logprobs(output)
        events: Events = []
        # Arguments of a call that has begun precede all other output.
        for call in output.calls:
            if not call.call_id:
                assert isinstance(self._open, CallItem), "its first piece has opened it"
                events += self._open.push(call.arguments)
        if output.reasoning:
            events += self._add_reasoning(output.reasoning)
        if output.text:
            logprobs, self._waiting_logprobs = self._waiting_logprobs, []
            if self._demanded is not None:
                events += self._add_input(self._demanded, output.text)
            else:
                events += self._add_text(output.text, logprobs)
        for call in output.calls:
            if call.call_id:
                events += self._add_call(call)
        if output.finish_reason is not None:
            events += self._end(is_cut=output.finish_reason != STOP)
        return events

    def snapshot(self) -> list[OutputItem]:
        """Returns the items so far; one that is not done is incomplete."""
        return self._done if self._open is None else [*self._done, self._open.whole("incomplete")]

    def _keep_logprobs(self, output: Output) -> None:
        """Keeps the log-probabilities of a message's tokens."""
        if self._logprobs is not None:
            self._waiting_logprobs += self._logprobs.push(output)["content"]
        if not output.text and (output.reasoning or output.calls):
            self._waiting_logprobs = []

    def _add_reasoning(self, text: str) -> Events:
        item, events = self._open, []
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(self._next_index, self._numbers)
            events = self._begin(item)
        return [*events, item.push(text)]

    def _add_text(self, text: str, logprobs: list[TextLogprob]) -> Events:
        item, events = self._open, []
        if not isinstance(item, MessageItem):
            item = MessageItem(self._next_index, self._numbers)
            events = self._begin(item)
        return [*events, item.push(text, logprobs)]

    def _add_input(self, name: CallName, text: str) -> Events:
        """Adds to the input of the custom tool that the reply is for."""
        item, events = self._open, []
        if not isinstance(item, CustomCallItem):
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            item = DemandedCallItem(call_id, name, self._next_index, self._numbers)
            events = self._begin(item)
        return [*events, *item.push(text)]

    def _add_call(self, call: CallPiece) -> Events:
        name = self._names.get(call.name) or CallName(call.name)
        kind = CustomCallItem if name.is_custom else FunctionCallItem
        item = kind(call.call_id, name, self._next_index, self._numbers)
        events = self._begin(item)
        return [*events, *item.push(call.arguments)] if call.arguments else events

    def _begin(self, item: MessageItem | ReasoningItem | CallItem) -> Events:
        events = self._close("completed")
        self._open = item
        return events + item.opening()

    def _close(self, status: ItemStatus) -> Events:
        item, self._open = self._open, None
        if item is None:
            return []
        self._done.append(item.whole(status))
        return item.closing(status)

    def _end(self, *, is_cut: bool) -> Events:
        """Ends the last item; a reply without text or calls is an empty message."""
        events: Events = []
        if self._open is None:
            events = self._begin(MessageItem(0, self._numbers))
        return events + self._close("incomplete" if is_cut else "completed")

    @property
    def _next_index(self) -> int:
        return len(self._done) + (self._open is not None)
