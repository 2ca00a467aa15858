"""Decodes a stream of token ids, whole characters at a time."""

import codecs
from collections.abc import Iterable, Sequence

MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so it spans at most four visible tokens."""

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one request's output incrementally.

    A character that spans tokens appears with its last byte. Invalid bytes become U+FFFD.
    """

    def __init__(self, token_bytes: Sequence[bytes], prompt_token_ids: Sequence[int] = ()) -> None:
        """Starts after a prompt."""
        self._token_bytes = token_bytes
        self._decoder = _utf8_decoder(errors="replace")
        self.push(_visible_tail(token_bytes, prompt_token_ids))

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes tokens and returns the completed text, which may be empty."""
        token_bytes = self._token_bytes
        return self._decoder.decode(b"".join([token_bytes[token_id] for token_id in token_ids]))

    @property
    def is_inside_character(self) -> bool:
        """Whether a character has begun and has not ended."""
        return self._decoder.getstate()[0] != b""

    def flush(self) -> str:
        """Ends the output: returns U+FFFD inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _visible_tail(token_bytes: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
    """Returns the last tokens that may hold an unfinished character."""
    tail: list[int] = []
    for token_id in reversed(token_ids):
        if token_bytes[token_id]:
            tail.append(token_id)
            if len(tail) == MAX_CHARACTER_TOKENS:
                break
    return tail[::-1]
