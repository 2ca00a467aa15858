"""Reads one reply: what every format of tool calls has in common."""

import contextlib
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

from services.frontend.reply.bare_values import ArgumentSchemas
from services.frontend.reply.call_form import CallForm
from services.frontend.reply.deltas import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
    merged,
)
from services.frontend.reply.first_object import first_object
from services.frontend.reply.incoming_text import (
    CutOffError,
    Emit,
    IncomingText,
    UnexpectedTextError,
    Wait,
    pieces_of,
)
from services.frontend.text.surrogates import without_halves

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
    call_markers: ClassVar[tuple[str, ...]] = ()
    """Markers that begin calls, and no other text, in reasoning too."""
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
        self._schemas: dict[str, ArgumentSchemas] = {}
        self._text = IncomingText()
        self._deltas: list[Delta] = []
        self._space = ""
        self._has_content = continues and not is_reasoning
        self._continues_reasoning = continues and is_reasoning
        self._num_calls = 0
        self._has_arguments = self._has_all_arguments = False
        self._ends: tuple[str, ...] = ()
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
        for piece in pieces_of(text):
            self._text.push(piece)
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

    def _read_reasoning(self, *closing: str) -> Generator[None, None, str | None]:
        """Passes reasoning on up to a closing marker, and returns it; None if there is none.

        A call in reasoning that is never closed ends it, and is read next.
        """
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
        openings = self.call_markers if self._tools else ()
        while (marker := (yield from self._text.until(*closing, *openings, emit=emit))) in openings:
            assert marker is not None, "None is no marker"
            held = [marker]
            if (yield from self._is_call_ahead(marker)):
                self._text.keep()
                marker = yield from self._text.until(*closing, emit=held.append)
                if marker is None:
                    self._text.unread()
                    self._text.put_back(held[0])
                    break
                self._text.forget()
                self._text.put_back(marker)
            emit("".join(held))
        self._is_reasoning = False
        return marker

    def _is_call_ahead(self, opening: str) -> Generator[None, None, bool]:
        """Whether a call follows its opening marker; nothing is read."""
        trial = type(self)(self._tools)
        deltas, length = trial.push(opening), 0
        while not deltas and not self._text.is_over:
            more = self._text.ahead(length)
            length += len(more)
            deltas = trial.push(more)
            if not deltas:
                yield
        return bool(deltas) and isinstance(deltas[0], CallStart)

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
        self._text.keep()
        self._space, self._has_content = "", False
        name = without_halves(name.strip())
        self._deltas.append(CallStart(self._num_calls, self._new_call_id(), name))
        self._num_calls += 1
        self._has_arguments = self._has_all_arguments = False

    def _emit_arguments(self, text: str) -> None:
        """Passes on more of the arguments of the call that began last."""
        self._text.keep()
        if text:
            self._has_arguments = True
            self._deltas.append(CallArguments(self._num_calls - 1, without_halves(text)))

    def _end_call(self) -> None:
        """Ends a call; one without arguments has an empty object."""
        if not self._has_arguments:
            self._emit_arguments("{}")
        self._has_all_arguments = True

    def _try_call(
        self,
        call: Wait,
        *,
        opening: str = "",
        closing: Sequence[str] = (),
        following: Sequence[str] = (),
    ) -> Wait:
        """Reads a call; if it is none, its text is content.

        One that is cut off before its name is complete is dropped, if it has a marker. One that is
        cut off before its arguments has none, unlike a complete one.

        Args:
            call: reads it after its opening marker.
            opening: the marker, which is content too if this is no call.
            closing: markers that end it.
            following: other markers that cannot be in it.
        """
        num_calls = self._num_calls
        self._ends = (*closing, *following)
        self._text.keep()
        try:
            yield from call
        except UnexpectedTextError as error:
            is_cut_off = isinstance(error, CutOffError)
            if self._num_calls == num_calls:
                if opening and is_cut_off:
                    self._text.forget()
                    return
                self._text.unread()
                self._emit_content(opening)
                return
            if is_cut_off and self._text.is_cut:
                self._text.forget()
                return
            if not self._has_all_arguments:
                self._text.unread()  # the caller sees what the model wrote
                yield from self._read_damage(self._emit_arguments, closing, following)
            elif not is_cut_off:
                self._text.forget()
                after: list[str] = []
                if not (yield from self._read_damage(after.append, closing, following)):
                    self._emit_content("".join(after))
        self._text.forget()
        if self._num_calls > num_calls:  # a list of calls may be empty
            self._end_call()

    def _read_damage(
        self, emit: Emit, closing: Sequence[str], following: Sequence[str]
    ) -> Generator[None, None, bool]:
        """Reads the rest of a damaged call, and returns whether a marker closes it."""
        marker = yield from self._text.until(*closing, *following, emit=emit)
        if marker is not None and marker not in closing:
            self._text.forget()
            self._text.put_back(marker)
        return marker in closing

    def _read_call_object(self) -> Wait:
        """Reads {"name": ..., "arguments": {...}}, in any order; "parameters" is as good.

        Raises:
            UnexpectedTextError: it is none.
        """
        text = self._text
        has_name, early = False, None
        yield from text.expect("{")
        while not (yield from self._ends_call_object(has_name=has_name)):
            key = yield from text.json_string()
            yield from text.expect(":")
            if key == "name" and not has_name:
                self._start_call((yield from text.json_string()))
                has_name = True
                if early is not None:
                    self._emit_arguments(early)
                    self._end_call()
            elif key not in ("arguments", "parameters"):
                yield from text.json_value(lambda _: None)
            elif not has_name:
                early = yield from self._arguments_text()
            elif self._has_all_arguments:
                yield from text.json_value(lambda _: None)
            else:
                yield from self._read_arguments()
            yield from text.accept(",")
        if not has_name:
            raise UnexpectedTextError
        self._end_call()

    def _ends_call_object(self, *, has_name: bool) -> Generator[None, None, bool]:
        """Whether the object's brace follows, which is read, or what comes after a missing one."""
        if (yield from self._text.accept("}")) is not None:
            return True
        is_complete = has_name and self._has_all_arguments
        return is_complete and (yield from self._text.starts_with("{", "]", ";"))

    def _read_arguments(self) -> Wait:
        """Passes a JSON object on as it comes, and anything else when it is complete."""
        yield from self._text.skip_space()
        self._text.keep()
        if (yield from self._text.starts_with("{")):
            yield from self._text.json_value(self._emit_arguments, self._ends)
        else:
            self._emit_arguments((yield from self._arguments_text()))
        self._has_all_arguments = True

    def _arguments_text(self) -> Generator[None, None, str]:
        """Returns arguments; an object may be written as a string, and null is an empty one."""
        pieces: list[str] = []
        yield from self._text.json_value(pieces.append)
        text = "".join(pieces)
        if text.startswith('"'):
            with contextlib.suppress(ValueError):
                text = first_object(str(json.loads(text, strict=False)))
        return "{}" if text.strip() in ("", "null") else text

    def _read_pairs(self, name: str, *, closing: str) -> Wait:
        """Reads a tool's arguments as the pairs of the form of calls, up to `closing`.

        Each is passed on when it is complete. A line break before or after a value is not part of
        it where the form has one.

        Raises:
            UnexpectedTextError: something else follows.
        """
        assert self.call_form is not None, "the format has calls"
        pairs, schemas = self.call_form.pairs, self._schemas_of(name)
        assert pairs is not None, "they have pairs"
        begin, end = pairs.begin.strip(), pairs.end.strip()
        key_end, *value_begin = pairs.assign.split()
        opening = "{"
        while (yield from self._text.expect(begin, closing)) == begin:
            key = (yield from self._text.text_until(key_end)).strip()
            for marker in value_begin:
                yield from self._text.expect(marker)
            written = yield from self._text.value_until(end, begin, closing)
            if pairs.end.startswith("\n"):
                written = written.removeprefix("\n").removesuffix("\n")
            value = schemas.json_of(written, key)
            self._emit_arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: {value}")
            opening = ", "
        self._emit_arguments("{}" if opening == "{" else "}")
        self._has_all_arguments = True

    def _schemas_of(self, name: str) -> ArgumentSchemas:
        """Returns the schemas of a tool's arguments."""
        if name not in self._schemas:
            self._schemas[name] = ArgumentSchemas(self._tools.get(name))
        return self._schemas[name]

    def _new_call_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return merged(deltas)
