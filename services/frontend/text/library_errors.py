"""Encodes with the tokenizers library and maps its errors, for which it has no classes."""

from collections.abc import Iterator
from contextlib import contextmanager

import tokenizers

_PANIC = "PanicException"
"""Class of an error in Rust. It is no `Exception`, so edges would not catch it, and PyO3 exports
no name for it."""


class EncodingError(Exception):
    """The tokenizer cannot encode a text; the message says why."""


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
    tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool
) -> tokenizers.Encoding:
    """Encodes one text.

    Raises:
        EncodingError: the tokenizer cannot encode it.
    """
    with library_errors(EncodingError, "this model's tokenizer cannot encode the text"):
        # Unlike encode, the batch call releases the GIL (418 ms of blocking for 1 MB, 2026-11).
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding
