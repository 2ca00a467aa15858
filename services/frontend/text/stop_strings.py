"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of one piece of text."""

    text: str
    """Text to show now, without any part of a stop string that is not to be shown."""
    stop_string: str | None = None
    """The stop string that ended the text, if any."""


class StopStrings:
    """Passes text up to the first stop string, and holds back what may begin one.

    The first complete stop string wins; of several that end together, the longest.
    """

    def __init__(self, stop_strings: Iterable[str], *, are_shown: bool = False) -> None:
        """Takes non-empty stop strings. If they are shown, the text ends with the one found."""
        self._are_shown = are_shown
        self._patterns = [_Pattern(stop) for stop in sorted(set(stop_strings), key=len)]
        self._held = ""

    def __bool__(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._patterns)

    def push(self, text: str, *, may_end: bool = True) -> Scan:
        """Takes text. Must not be called after a stop string was found.

        With `may_end` false, a stop string completed in it is ordinary text.
        """
        if not self._patterns:
            return Scan(text)
        found: _Pattern | None = None
        end = len(text)
        for pattern in self._patterns:  # shortest first, so that a longer one wins a tie
            if not may_end:
                pattern.pass_over(text)
                continue
            match_end = pattern.advance(text, end)
            if match_end is not None:
                found, end = pattern, match_end
        if self._are_shown:  # what begins a stop string is shown in any case
            return Scan(text[:end], None if found is None else found.stop_string)
        seen = self._held + text
        if found is not None:
            start = len(self._held) + end - len(found.stop_string)
            return Scan(seen[:start], found.stop_string)
        shown = len(seen) - max(pattern.num_matched for pattern in self._patterns)
        self._held = seen[shown:]
        return Scan(seen[:shown])

    def flush(self) -> str:
        """Ends the text: returns what was held back. Text after it is another one."""
        for pattern in self._patterns:
            pattern.num_matched = 0
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string and its matched prefix (Knuth, Morris, Pratt 1977), in linear time."""

    def __init__(self, stop_string: str) -> None:
        self.stop_string = stop_string
        self.num_matched = 0
        self._borders = _borders(stop_string)

    def pass_over(self, text: str) -> None:
        """Reads text in which the stop string does not count."""
        match_end = self.advance(text, len(text))
        while match_end is not None:
            self.num_matched = self._borders[-1]
            match_end = self.advance(text, len(text), start=match_end)

    def advance(self, text: str, limit: int, *, start: int = 0) -> int | None:
        """Reads `text[start:limit]`; returns the end of the first match, or None."""
        stop_string, borders = self.stop_string, self._borders
        matched = self.num_matched
        position = start
        while position < limit:
            if matched == 0:  # nothing matched: jump to the next possible start
                position = text.find(stop_string[0], position, limit)
                if position < 0:
                    break
            while matched and text[position] != stop_string[matched]:
                matched = borders[matched - 1]
            if text[position] == stop_string[matched]:
                matched += 1
            position += 1
            if matched == len(stop_string):
                return position
        self.num_matched = matched
        return None


def _borders(pattern: str) -> list[int]:
    """Returns, for each prefix, the length of its longest proper prefix that is also a suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
