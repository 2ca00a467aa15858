"""Reads one reply: what every format of tool calls has in common."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from services.frontend.reply.bare_values import json_of, schema_of
from services.frontend.reply.call_form import CallForm
from services.frontend.reply.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from services.frontend.reply.incoming_text import (
    CutOffError,
    IncomingText,
    UnexpectedTextError,
    Wait,
)

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of the parameters of each tool, by the tool's name."""


class ReplyReader(ABC):
    """Reads one reply of a chat model as it comes.

    Text between calls is content. White space at the start of a reply and around calls and
    reasoning is dropped. Text that looks like a call and is none is content, as it is written.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens of the format, which the reader must get as text."""
    think: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    """The markers around reasoning."""
    call_form: ClassVar[CallForm | None] = None
    """How calls are written, for grammars; None if the format has none."""
    has_calls: ClassVar[bool] = True
    """Whether the format has tool calls."""
    always_reasons: ClassVar[bool] = False
    """Whether replies may have reasoning whatever the chat template says."""

    def __init__(
        self, tools: Tools, *, is_reasoning: bool = False, continues: bool = False
    ) -> None:
        """Starts a reply.

        Args:
            tools: tools that the model may call.
            is_reasoning: the prompt has opened the reasoning.
            continues: the prompt ends inside a text, the reasoning's or else the content's, whose
                white space the reply begins with.
        """
        self._tools = tools
        self._text = IncomingText()
        self._deltas: list[Delta] = []
        self._space = ""
        self._has_content = continues and not is_reasoning
        self._continues_reasoning = continues and is_reasoning
        self._num_calls = 0
        self._has_arguments = False
        self._is_reasoning = is_reasoning
        self._reading = self._read(is_reasoning=is_reasoning)

    @classmethod
    def preamble(cls, *, is_call: bool) -> tuple[str, str]:
        """Returns the texts around the reasoning before calls, or before an answer."""
        del is_call
        return cls.think

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return self._num_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the reply is inside its reasoning."""
        return self._is_reasoning

    @property
    def is_holding(self) -> bool:
        """Whether the last text is held back, as it may belong to a marker."""
        return not self._text.is_empty

    def push(self, text: str) -> list[Delta]:
        """Takes more text and returns the pieces that it completes."""
        self._text.push(text)
        next(self._reading, None)
        return self._take_deltas()

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Ends the reply and returns what was held back.

        With `is_cut` the reply was to go on: half a marker at its end is dropped.
        """
        self._text.end(is_cut=is_cut)
        for _ in self._reading:
            raise AssertionError("the reader waits for text after the end of the reply")
        if self._has_content and not self._num_calls and self._space:
            self._deltas.append(Content(self._space))
        return self._take_deltas()

    @abstractmethod
    def _read_reply(self) -> Wait:
        """Reads content and calls to the end of the reply."""

    def _read(self, *, is_reasoning: bool) -> Wait:
        opening, closing = self.think
        if not is_reasoning and not self._has_content:
            is_reasoning = (yield from self._text.accept(opening)) is not None
        if is_reasoning:
            yield from self._read_reasoning(closing)
        yield from self._read_reply()

    def _read_reasoning(self, *closing: str) -> Wait:
        """Passes reasoning on up to its closing marker."""
        space = ""

        def emit(text: str) -> None:
            nonlocal space
            shown = (space + text).rstrip()
            space = (space + text)[len(shown) :]
            if shown:
                self._deltas.append(Reasoning(shown))

        self._is_reasoning = True
        if not self._continues_reasoning:
            yield from self._text.skip_space()
        self._continues_reasoning = False
        yield from self._text.until(*closing, emit=emit)
        self._is_reasoning = False

    def _read_content(self, *markers: str) -> Generator[None, None, str | None]:
        """Passes content on up to a marker, and returns it; None at the end of the reply."""
        return self._text.until(*markers, emit=self._emit_content)

    def _emit_content(self, text: str) -> None:
        """Passes content on; white space at its end waits, since a call may follow."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not self._has_content:
            shown = shown.lstrip()
        if shown:
            self._has_content = True
            self._deltas.append(Content(shown))

    def _start_call(self, name: str) -> None:
        """Begins a call; from here on its text is no content any more.

        Raises:
            UnexpectedTextError: it has no name.
        """
        if not name.strip():
            raise UnexpectedTextError
        self._text.forget()
        self._space, self._has_content = "", False
        self._deltas.append(CallStart(self._num_calls, self._new_call_id(), name.strip()))
        self._num_calls += 1
        self._has_arguments = False

    def _emit_arguments(self, text: str) -> None:
        """Passes on more of the arguments of the call that began last."""
        if text:
            self._has_arguments = True
            self._deltas.append(CallArguments(self._num_calls - 1, text))

    def _end_call(self) -> None:
        """Ends a call; one without arguments has an empty object."""
        if not self._has_arguments:
            self._emit_arguments("{}")

    def _try_call(self, call: Wait, *, closing: str, opening: str = "") -> Wait:
        """Reads a call; if it is none, its text is content.

        One that is cut off before its name is complete is dropped, if it has a marker.

        Args:
            call: reads it after its opening marker.
            closing: ends it; empty: nothing does.
            opening: the marker, which is content too if this is no call.
        """
        num_calls = self._num_calls
        self._text.keep()
        try:
            yield from call
        except UnexpectedTextError as error:
            if self._num_calls == num_calls:
                if opening and isinstance(error, CutOffError):
                    self._text.forget()
                    return
                self._text.unread()
                self._emit_content(opening)
                return
            if closing:  # the caller sees what the model wrote
                yield from self._text.until(closing, emit=self._emit_arguments)
        self._text.forget()
        self._end_call()

    def _read_call_object(self) -> Wait:
        """Reads {"name": ..., "arguments": {...}}, in any order; "parameters" is as good.

        Raises:
            UnexpectedTextError: it is none.
        """
        text = self._text
        name, early = None, ""
        yield from text.expect("{")
        while (yield from text.accept("}")) is None:
            key = yield from text.json_string()
            yield from text.expect(":")
            if key == "name":
                name = yield from text.json_string()
                self._start_call(name)
                self._emit_arguments(early)
            elif key in ("arguments", "parameters"):
                if name is None:
                    early = yield from self._arguments_text()
                else:
                    yield from self._pass_arguments()
            else:
                yield from text.json_value(lambda _: None)
            yield from text.accept(",")
        if name is None:
            raise UnexpectedTextError

    def _pass_arguments(self) -> Wait:
        """Passes a JSON object on as it comes; one that is written as a string, whole."""
        yield from self._text.skip_space()
        if (yield from self._text.starts_with('"')):
            self._emit_arguments((yield from self._text.json_string()))
        else:
            yield from self._text.json_value(self._emit_arguments)

    def _read_pairs(self, name: str, *, closing: str) -> Wait:
        """Reads a tool's arguments as the pairs of the form of calls, up to `closing`.

        Each is passed on when it is complete. A line break before or after a value is not part of
        it where the form has one.

        Raises:
            UnexpectedTextError: something else follows.
        """
        assert self.call_form is not None, "the format has calls"
        pairs = self.call_form.pairs
        assert pairs is not None, "they have pairs"
        opening = "{"
        while (yield from self._text.expect(pairs.begin, closing)) == pairs.begin:
            key = (yield from self._text.text_until(pairs.assign.rstrip())).strip()
            written = yield from self._text.text_until(pairs.end.strip())
            if pairs.assign.endswith("\n"):
                written = written.removeprefix("\n").removesuffix("\n")
            value = json_of(written, schema_of(self._tools.get(name), key))
            self._emit_arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: {value}")
            opening = ", "
        self._emit_arguments("{}" if opening == "{" else "}")

    def _arguments_text(self) -> Generator[None, None, str]:
        """Returns arguments that come before the name."""
        yield from self._text.skip_space()
        if (yield from self._text.starts_with('"')):
            return (yield from self._text.json_string())
        pieces: list[str] = []
        yield from self._text.json_value(pieces.append)
        return "".join(pieces)

    def _new_call_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return _merged(deltas)


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Joins neighbours of one kind."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        match last, delta:
            case Content(), Content():
                merged[-1] = Content(last.text + delta.text)
            case Reasoning(), Reasoning():
                merged[-1] = Reasoning(last.text + delta.text)
            case CallArguments(), CallArguments() if last.index == delta.index:
                merged[-1] = CallArguments(last.index, last.text + delta.text)
            case _:
                merged.append(delta)
    return merged
