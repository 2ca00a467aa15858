"""Turns a stream of token ids into text, whole characters at a time."""

import codecs
from collections.abc import Iterable, Sequence

MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so it is spread over at most four visible tokens."""

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one request's output as it comes.

    A character that is spread over tokens appears when its last byte is there, so nothing broken is
    ever shown. Bytes that cannot become a character appear as U+FFFD, exactly as they would if the
    whole output were decoded at once.
    """

    def __init__(self, token_bytes: Sequence[bytes], prompt_token_ids: Sequence[int] = ()) -> None:
        """Starts behind a prompt.

        Args:
            token_bytes: the bytes of each token id, from `Tokenizer.token_bytes`.
            prompt_token_ids: the prompt; a character that it leaves open is finished by the output.
        """
        self._token_bytes = token_bytes
        self._decoder = _utf8_decoder(errors="replace")
        self.push(_visible_tail(token_bytes, prompt_token_ids))

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes more tokens and returns the text that they complete, which may be empty."""
        token_bytes = self._token_bytes
        return self._decoder.decode(b"".join([token_bytes[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        """Ends the output: returns U+FFFD when it stops inside a character, else nothing."""
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
