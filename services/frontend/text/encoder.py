"""Encodes texts and decodes tokens with the tokenizers library."""

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from services.frontend.text.content_marks import MarkedText
from services.frontend.text.library_errors import encode_text
from services.frontend.text.literal_encoder import LiteralEncoder


class Encoder:
    """A tokenizer's library, in the calling thread.

    It parses special tokens in text unless told otherwise; see `encode`.
    """

    def __init__(self, content: bytes) -> None:
        """Reads a tokenizer.json."""
        self.library: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(content)
        """The tokenizer itself."""
        self.library.no_truncation()
        self.library.no_padding()
        self._literal = LiteralEncoder(content)

    @property
    def special_tokens(self) -> Sequence[str]:
        """The spellings of special tokens."""
        return self._literal.special_tokens

    def encode(
        self,
        text: str | MarkedText,
        *,
        add_special_tokens: bool,
        parse_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encodes a text.

        Args:
            text: the text; in a marked prompt, special tokens do not span marks.
            add_special_tokens: adds the model's tokens around a plain prompt.
            parse_special_tokens: whether spellings in unmarked text are special tokens.
            max_tokens: a number of tokens that is refused, as are more; None allows any.

        Raises:
            EncodingError: the text, or a spelling in it, cannot be encoded.
            TooManyTokensError: it has `max_tokens` or more.
        """
        if isinstance(text, str):
            plain = text if parse_special_tokens else None
        else:
            plain = self._literal.unmarked(text)
        if plain is None:
            return self._literal.encode(
                text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
        encoding = encode_text(
            self.library, plain, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, show_special_tokens: bool) -> str:
        """Decodes token ids of the vocabulary; broken characters become U+FFFD."""
        [text] = self.library.decode_batch(
            [list(token_ids)], skip_special_tokens=not show_special_tokens
        )
        return str(text)


@dataclass(frozen=True, slots=True)
class Encoding:
    """The arguments of `Encoder.encode`."""

    text: str | MarkedText
    add_special_tokens: bool
    parse_special_tokens: bool
    max_tokens: int | None

    def run(self, encoder: Encoder) -> list[int]:
        """Encodes the text now."""
        return encoder.encode(
            self.text,
            add_special_tokens=self.add_special_tokens,
            parse_special_tokens=self.parse_special_tokens,
            max_tokens=self.max_tokens,
        )
