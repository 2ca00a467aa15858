"""A reply's text as it comes, for readers that are written as if it were all there.

A reader is a generator: it yields where it needs more text, and goes on when there is some. So a
format's grammar is straight code, and text is passed on as soon as it can mean only one thing.
"""

import functools
import json
import re
from collections.abc import Callable, Generator, Sequence

Emit = Callable[[str], None]
"""Takes text that is passed on."""
Wait = Generator[None, None, None]

_PIECE = 2**12
"""Characters that are pushed at once: each step of a reader moves what is not read yet."""
_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[\w.-]*")
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_OUT_OF_PYTHON_STRING = re.compile(r"[^\"'(){}\[\],]*")
_ESCAPED_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(32)}
"""Characters that models write as they are, such as line breaks, and JSON's strings lack."""
_SCALAR = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")


@functools.cache
def _marker_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Returns the expression of a marker (its group 1), or of half a marker at the end."""
    halves = {marker[:length] for marker in markers for length in range(1, len(marker))}
    whole, half = (
        "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"
        for texts in (markers, halves)
    )
    return re.compile(rf"({whole})|(?:{half})\Z")


@functools.cache
def _out_of_string(ends: tuple[str, ...]) -> re.Pattern[str]:
    """Returns the expression of JSON text without strings, brackets, commas and starts of ends."""
    starts = "".join(re.escape(end[0]) for end in ends)
    return re.compile(rf'[^"{{}}\[\],{starts}]*')


class UnexpectedTextError(Exception):
    """The text is not what a format has at this position."""


class CutOffError(UnexpectedTextError):
    """The reply ended too early."""


class IncomingText:
    """Text of which the front is read while more comes to the end."""

    def __init__(self) -> None:
        self._buffer = ""
        self._is_over = self._is_cut = False
        self._kept: list[str] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether all text so far is read."""
        return not self._buffer

    @property
    def is_over(self) -> bool:
        """Whether no more text comes."""
        return self._is_over

    @property
    def is_cut(self) -> bool:
        """Whether the text has ended and was to go on."""
        return self._is_cut

    def push(self, text: str) -> None:
        """Adds text at the end."""
        self._buffer += text

    def end(self, *, is_cut: bool = False) -> None:
        """Ends the text.

        With `is_cut` it was to go on: half a marker at its end is dropped.
        """
        self._is_over, self._is_cut = True, is_cut

    def keep(self) -> None:
        """Keeps what is read from now on, for `unread`."""
        self._kept = []

    def forget(self) -> None:
        """Keeps nothing any more."""
        self._kept = None

    def unread(self) -> None:
        """Takes back what was read since `keep`."""
        kept, self._kept = self._kept or [], None
        self._buffer = "".join(kept) + self._buffer

    def put_back(self, marker: str) -> None:
        """Makes the marker that was read last the next to be read."""
        if self._kept:
            self._kept.pop()
        self._buffer = marker + self._buffer

    def ahead(self, start: int) -> str:
        """Returns the text that has come and is not read, from an offset on."""
        return self._buffer[start:]

    def until(self, *markers: str, emit: Emit) -> Generator[None, None, str | None]:
        """Passes text on up to the first of some markers, and reads the marker.

        Returns:
            The marker; None if the reply ended without one.
        """
        pattern = _marker_pattern(markers)
        while True:
            match = pattern.search(self._buffer)
            end = len(self._buffer) if match is None else match.start()
            if match is not None and match[1]:
                self._emit(end, emit)
                return self._take(len(match[1]))
            if self._is_over:
                self._emit(end if self._is_cut else len(self._buffer), emit)
                self._buffer = ""
                return None
            self._emit(end, emit)
            yield

    def text_until(self, marker: str) -> Generator[None, None, str]:
        """Returns the text up to a marker, and reads both.

        Raises:
            CutOffError: the reply ended without it.
        """
        pieces: list[str] = []
        if (yield from self.until(marker, emit=pieces.append)) is None:
            raise CutOffError
        return "".join(pieces)

    def text_before(self, characters: str) -> Generator[None, None, str]:
        """Returns the text before the first of some characters.

        Raises:
            CutOffError: the reply ended without one.
        """
        pieces: list[str] = []
        marker = yield from self.until(*characters, emit=pieces.append)
        if marker is None:
            raise CutOffError
        self.put_back(marker)
        return "".join(pieces)

    def value_until(self, end: str, *following: str) -> Generator[None, None, str]:
        """Returns the text up to the marker that ends a value, and reads both.

        It is followed by one of some texts or the end of the reply; elsewhere it is text.

        Raises:
            CutOffError: the reply ended without it.
        """
        value = ""
        while True:
            value += yield from self.text_until(end)
            space = yield from self._space()
            if (yield from self.starts_with(*following)) or self._may_become(following):
                return value
            value += end + space

    def accept(self, *wanted: str) -> Generator[None, None, str | None]:
        """Reads one of some texts if the text continues with it; white space before it is skipped.

        Returns:
            The text; None if something else follows.
        """
        yield from self.skip_space()
        yield from self.starts_with(*wanted)
        for each in wanted:
            if self._buffer.startswith(each):
                return self._take(len(each))
        return None

    def starts_with(self, *wanted: str) -> Generator[None, None, bool]:
        """Whether the text continues with one of some texts; nothing is read."""
        while not self._buffer.startswith(wanted):
            if self._is_over or not self._may_become(wanted):
                return False
            yield
        return True

    def skip_any(self, characters: str) -> Wait:
        """Reads white space and some characters, as many as there are."""
        yield from self.skip_space()
        while self._buffer and self._buffer[0] in characters:
            self._take(1)
            yield from self.skip_space()

    def expect(self, *wanted: str) -> Generator[None, None, str]:
        """Reads one of some texts, and returns it.

        Raises:
            UnexpectedTextError: something else follows.
        """
        found = yield from self.accept(*wanted)
        if found is None:
            raise CutOffError if self._may_become(wanted) else UnexpectedTextError
        return found

    def word(self) -> Generator[None, None, str]:
        """Returns letters, digits and any of `_.-`, as many as there are; white space is skipped.

        Raises:
            CutOffError: the reply ended with them.
        """
        yield from self.skip_space()
        word = ""
        while True:
            match = _WORD.match(self._buffer)
            word += self._take(match.end() if match else 0)
            if self._buffer:
                return word
            yield from self._more()

    def skip_space(self) -> Wait:
        """Reads white space."""
        yield from self._space()

    def json_value(self, emit: Emit, ends: tuple[str, ...] = ()) -> Wait:
        """Passes one JSON value on as it comes, to the letter; in strings it escapes line breaks.

        Args:
            emit: takes its text.
            ends: texts that end an incomplete object or list, outside its strings.

        Raises:
            UnexpectedTextError: there is none, its brackets do not match, or it is cut off.
        """
        yield from self.skip_space()
        first = self._buffer[:1]
        if first == '"':
            yield from self._json_string(emit)
        elif first in ("{", "["):
            yield from self._json_container(emit, ends)
        else:
            yield from self._json_scalar(emit)

    def json_string(self) -> Generator[None, None, str]:
        """Returns a JSON string's content.

        Raises:
            UnexpectedTextError: there is none, or it is cut off.
        """
        yield from self.skip_space()
        pieces: list[str] = []
        yield from self._json_string(pieces.append)
        try:
            return str(json.loads("".join(pieces), strict=False))
        except ValueError:
            raise UnexpectedTextError from None

    def python_value(self, emit: Emit) -> Wait:
        """Passes on the text of one Python literal, up to the comma or bracket that ends it.

        Raises:
            UnexpectedTextError: its brackets do not match, or it is cut off.
        """
        depth = 0
        while True:
            match = _OUT_OF_PYTHON_STRING.match(self._buffer)
            self._emit(match.end() if match else 0, emit)
            character = self._buffer[:1]
            if not character:
                yield from self._more()
            elif character in "\"'":
                yield from self._python_string(character, emit)
            elif depth == 0 and character in ",)]}":
                return
            else:
                depth += (character in "([{") - (character in ")]}")
                self._emit(1, emit)

    def _python_string(self, quote: str, emit: Emit) -> Wait:
        inside = re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL)
        self._emit(1, emit)
        while True:
            match = inside.match(self._buffer)
            self._emit(match.end() if match else 0, emit)
            if self._buffer.startswith(quote):
                self._emit(1, emit)
                return
            yield from self._more()

    def _json_string(self, emit: Emit) -> Wait:
        while not self._buffer:
            yield from self._more()
        if self._buffer[0] != '"':
            raise UnexpectedTextError
        self._emit(1, emit)
        while True:
            match = _IN_STRING.match(self._buffer)
            if match and match.end():
                emit(self._take(match.end()).translate(_ESCAPED_CONTROLS))
            if self._buffer.startswith('"'):
                self._emit(1, emit)
                return
            yield from self._more()

    def _json_container(self, emit: Emit, ends: tuple[str, ...]) -> Wait:
        closers: list[str] = []
        pattern = _out_of_string(ends)
        while True:
            match = pattern.match(self._buffer)
            self._emit(match.end() if match else 0, emit)
            if self._buffer and (yield from self.starts_with(*ends)):
                raise UnexpectedTextError
            match self._buffer[:1]:
                case "":
                    yield from self._more()
                    continue
                case '"':
                    yield from self._json_string(emit)
                    continue
                case "{" | "[" as opener:
                    closers.append("}" if opener == "{" else "]")
                case "}" | "]" as closer if closers.pop() != closer:
                    raise UnexpectedTextError
            self._emit(1, emit)
            if not closers:
                return

    def _json_scalar(self, emit: Emit) -> Wait:
        while True:
            match = re.match(r"[-+.\w]*", self._buffer)
            length = match.end() if match else 0
            if length < len(self._buffer) or self._is_over:
                if not self._buffer:
                    raise CutOffError
                if not _SCALAR.fullmatch(self._buffer[:length]):
                    raise UnexpectedTextError
                self._emit(length, emit)
                return
            yield

    def _space(self) -> Generator[None, None, str]:
        """Reads white space, and returns it."""
        space = ""
        while True:
            match = _SPACE.match(self._buffer)
            space += self._take(match.end() if match else 0)
            if self._buffer or self._is_over:
                return space
            yield

    def _may_become(self, wanted: Sequence[str]) -> bool:
        """Whether the text that has come is the beginning of one of some texts."""
        return any(each.startswith(self._buffer) for each in wanted)

    def _more(self) -> Wait:
        """Waits for more text.

        Raises:
            CutOffError: there is none.
        """
        if self._is_over:
            raise CutOffError
        yield

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._kept is not None and text:
            self._kept.append(text)
        return text

    def _emit(self, length: int, emit: Emit) -> None:
        if length:
            emit(self._take(length))


def pieces_of(text: str) -> Sequence[str]:
    """Cuts a text in pieces to push, so that the time of a long one grows with its length alone."""
    if len(text) <= _PIECE:
        return (text,)
    return [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
