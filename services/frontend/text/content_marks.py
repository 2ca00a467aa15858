"""Marks caller text in a prompt, so that callers cannot spell special tokens.

A template mixes its own text with the caller's. Each text of the caller gets a mark, a character
used nowhere else, after every character that can begin a special token and before every character
that can end one. Only spellings without a mark inside are special tokens; marks are removed before
encoding. This also breaks spellings assembled from pieces of the caller's text.

Templates search for strings (`'</think>' in content`), so a template's own constants stay whole
unless they overlap with a special token.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_GROWTH = 7
"""Most bytes of a marked text per byte of text: a mark on both sides of one character."""

_MARKS = range(0xE000, 0xF900)
"""Private use area: three bytes of UTF-8, no meaning in Unicode."""


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A prompt in which special tokens never span a mark."""

    text: str
    mark: str

    @classmethod
    def read(cls, rendered: str) -> "MarkedText":
        """Parses the answer of a template process: the mark, then the prompt."""
        return cls(rendered[1:], rendered[:1])


class ContentMarker:
    """Marks the texts of conversations for one template and tokenizer."""

    def __init__(self, special_tokens: Iterable[str], constants: Iterable[str]) -> None:
        """Prepares the search."""
        spelled = [token for token in special_tokens if token]
        self._first = {token[0] for token in spelled}
        self._last = {token[-1] for token in spelled}
        self._reserved = set("".join(spelled))
        edges = "".join(re.escape(each) for each in sorted(self._first | self._last))
        self._edge = re.compile(f"[{edges}]") if edges else None
        overlaps = _Overlaps(spelled)
        kept = {
            constant
            for constant in constants
            if self._has_edge(constant) and not overlaps.has(constant)
        }
        longest_first = sorted(kept, key=len, reverse=True)
        self._kept = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if kept else None

    def free_mark(self, *values: Any) -> str:
        """Returns a character that occurs in no text of the values and in no special token.

        Raises:
            ValueError: there is none.
        """
        used = set(self._reserved)
        for value in values:
            _collect_characters(value, used)
        for code in _MARKS:
            if chr(code) not in used:
                return chr(code)
        raise ValueError("the conversation uses every private-use character")

    def marked(self, value: Any, mark: str) -> Any:
        """Returns a JSON value with marks in all its texts, including keys."""
        if self._edge is None:
            return value
        table = {
            ord(character): (mark if character in self._last else "")
            + character
            + (mark if character in self._first else "")
            for character in self._first | self._last
        }
        return self._marked(value, table)

    def _marked(self, value: Any, table: Mapping[int, str]) -> Any:
        if isinstance(value, str):
            return self._marked_text(value, table)
        if isinstance(value, Mapping):
            return {
                self._marked_text(key, table): self._marked(each, table)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._marked(each, table) for each in value]
        return value

    def _marked_text(self, text: str, table: Mapping[int, str]) -> str:
        if not self._has_edge(text):
            return text
        if self._kept is None:
            return text.translate(table)
        pieces = self._kept.split(text)  # every second piece is a constant
        pieces[::2] = [piece.translate(table) for piece in pieces[::2]]
        return "".join(pieces)

    def _has_edge(self, text: str) -> bool:
        return self._edge is not None and self._edge.search(text) is not None


def _collect_characters(value: Any, found: set[str]) -> None:
    if isinstance(value, str):
        found.update(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            found.update(key)
            _collect_characters(each, found)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect_characters(each, found)


class _Overlaps:
    """Checks whether a constant overlaps with the spelling of a special token."""

    def __init__(self, spelled: Sequence[str]) -> None:
        self._spelled = spelled
        self._joined = "\0".join(spelled)
        self._longest = max(map(len, spelled), default=0)
        self._prefixes = {token[:length] for token in spelled for length in range(1, len(token))}
        self._suffixes = {token[-length:] for token in spelled for length in range(1, len(token))}

    def has(self, constant: str) -> bool:
        """Whether it is part of a token, contains one, or contains an end of one."""
        if constant in self._joined or any(token in constant for token in self._spelled):
            return True
        return any(
            constant[-length:] in self._prefixes or constant[:length] in self._suffixes
            for length in range(1, min(len(constant), self._longest))
        )
