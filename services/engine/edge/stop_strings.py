"""Finds stop strings in tokens as they arrive."""

from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer

from services.engine.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256


@dataclass(frozen=True, slots=True)
class StopRule:
    """The stop strings of an output and where to search for them.

    Raises:
        InvalidRequestError: there are too many, or one is empty or too long.
    """

    texts: tuple[str, ...]
    skip_special_tokens: bool
    """Whether special tokens are left out of the text."""
    min_tokens: int
    """Leading tokens that are not searched."""

    def __post_init__(self) -> None:
        if len(self.texts) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(self.texts)} strings; the limit is {MAX_STOP_STRINGS}"
            )
        for text in self.texts:
            num_bytes = len(text.encode())
            if not 0 < num_bytes <= MAX_STOP_STRING_BYTES:
                raise InvalidRequestError(
                    f"a string of stop has {num_bytes} bytes; it must have 1 to"
                    f" {MAX_STOP_STRING_BYTES}"
                )


@dataclass(frozen=True, slots=True)
class FoundStop:
    """A stop string in the output."""

    text: str
    num_tokens: int
    """Searched tokens up to the one that completes the string."""


class StopStrings:
    """Searches one output as bytes, since a string may end inside a token.

    The first complete string wins; of several that end together, the longest.
    """

    def __init__(self, rule: StopRule, tokenizer: LLTokenizer) -> None:
        self._patterns = [(text.encode(), text) for text in sorted(rule.texts, key=len)]
        self._num_kept = max(len(pattern) for pattern, _ in self._patterns) - 1
        self._rule = rule
        self._tokenizer = tokenizer
        self._num_tokens = 0
        self._tail = b""

    def find(self, token_ids: Sequence[int]) -> FoundStop | None:
        """Takes tokens; must not be called after it found a string."""
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            if self._num_tokens <= self._rule.min_tokens:
                continue
            text = self._tail + self._bytes_of(token_id)
            if found := self._first_in(text):
                return FoundStop(found, count)
            self._tail = text[max(0, len(text) - self._num_kept) :]
        return None

    def _bytes_of(self, token_id: int) -> bytes:
        if self._rule.skip_special_tokens and self._tokenizer.is_special_token(token_id):
            return b""
        return self._tokenizer.decode_bytes([token_id])

    def _first_in(self, text: bytes) -> str | None:
        ends = (
            (text.find(pattern) + len(pattern), -len(pattern), stop)
            for pattern, stop in self._patterns
            if pattern in text
        )
        first = min(ends, default=None)
        return None if first is None else first[2]
