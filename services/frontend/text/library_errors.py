"""Encodes with the tokenizers library and maps its errors, for which it has no classes."""

from collections.abc import Iterator
from contextlib import contextmanager

import tokenizers

_PANIC = "PanicException"
"""Class of an error in Rust. It is no `Exception`, so edges would not catch it, and PyO3 exports
no name for it."""


class EncodingError(Exception):
    """The tokenizer cannot encode a text; the message says why."""


class TooManyTokensError(Exception):
    """A text has more tokens than are allowed."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens")
        self.num_tokens = num_tokens


@contextmanager
def library_errors(kind: type[Exception], what: str) -> Iterator[None]:
    """Raises `kind` instead of an error of the library.

    Args:
        kind: class of the error to raise.
        what: beginning of its message, such as "tokenizer.json cannot be read".
    """
    try:
        yield
    except BaseException as error:
        if type(error) in (Exception, ValueError) or type(error).__name__ == _PANIC:
            raise kind(f"{what}: {error}") from None
        raise


def encode_text(
    tokenizer: tokenizers.Tokenizer,
    text: str,
    *,
    add_special_tokens: bool,
    max_tokens: int | None = None,
) -> tokenizers.Encoding:
    """Encodes one text.

    Raises:
        EncodingError: the tokenizer cannot encode it.
        TooManyTokensError: it has `max_tokens` tokens or more.
    """
    with library_errors(EncodingError, "this model's tokenizer cannot encode the text"):
        # Unlike encode, the batch call releases the GIL (418 ms of blocking for 1 MB, 2026-11).
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    num_tokens = len(encoding)
    if max_tokens is not None and num_tokens >= max_tokens:
        del encoding  # it takes up to 400 bytes for each byte of text, and the error keeps frames
        raise TooManyTokensError(num_tokens)
    return encoding
