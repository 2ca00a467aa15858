"""Encodes text with special tokens only at chosen positions."""

import secrets
from collections.abc import Iterator, Mapping

import tokenizers

from services.frontend.text.content_marks import MarkedText
from services.frontend.text.library_errors import EncodingError, encode_text


class LiteralEncoder:
    """A tokenizer that takes special tokens only from a prompt's template.

    It copies the model's tokenizer without special tokens. Intended ones are replaced by aliases,
    added tokens with secret names, before the whole text is encoded at once: merges and whitespace
    depend on neighbours as usual.
    """

    def __init__(self, content: bytes) -> None:
        """Reads the tokenizer."""
        self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added: Mapping[int, tokenizers.AddedToken] = self._tokenizer.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        self.special_tokens = tuple(token.content for token in special.values())
        """Their spellings."""
        self.must_encode = self._tokenizer.normalizer is not None and any(
            token.normalized for token in special.values()
        )
        """Whether special tokens are matched in normalized text, where marks do not separate them.
        """
        self._finder = _finder(added)
        self._tokenizer.encode_special_tokens = True
        nonce = secrets.token_hex(16)
        self._aliases = {
            token.content: f"\U000f0000{nonce}-{token_id}\U000f0001"
            for token_id, token in special.items()
        }
        self._cut = f"\U000f0000{nonce}-cut\U000f0001"
        self._tokenizer.add_tokens(
            [
                tokenizers.AddedToken(
                    self._aliases[token.content],  # whether it is a word is settled by then
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                )
                for token in special.values()
            ]
            + [tokenizers.AddedToken(self._cut, normalized=False)]
        )
        self._meant_ids = {
            self._tokenizer.token_to_id(self._aliases[token.content]): token_id
            for token_id, token in special.items()
        }
        self._special_ids = frozenset(special)

    def unmarked(self, prompt: MarkedText) -> str | None:
        """Returns a prompt without marks; None if it needs `encode`."""
        text = prompt.text.replace(prompt.mark, "")
        if self.must_encode:
            return None
        if len(text) == len(prompt.text):
            return text
        meant = self._with_aliases(prompt.text).replace(prompt.mark, "")
        return text if meant == self._with_aliases(text) else None

    def encode(
        self,
        prompt: str | MarkedText,
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Returns token ids; a text has no special tokens, a prompt only the intended ones.

        Raises:
            EncodingError: a special token's spelling cannot be encoded as text, or the text cannot.
            TooManyTokensError: it has `max_tokens` tokens or more.
        """
        if isinstance(prompt, MarkedText):
            text = self._with_aliases(prompt.text).replace(prompt.mark, "")
        else:
            text = prompt
        token_ids, leaked = self._encode(text, add_special_tokens, max_tokens)
        if leaked:
            # Some vocabularies hold the spelling as an ordinary piece; then it is encoded in two.
            for spelling in self.special_tokens:
                text = text.replace(spelling, spelling[:1] + self._cut + spelling[1:])
            token_ids, leaked = self._encode(text, add_special_tokens, max_tokens)
        if leaked:
            name = self._tokenizer.id_to_token(leaked[0])
            raise EncodingError(
                f"the text holds {name!r}, which this tokenizer cannot encode as text"
            )
        return token_ids

    def _encode(
        self, text: str, add_special_tokens: bool, max_tokens: int | None
    ) -> tuple[list[int], list[int]]:
        """Returns token ids, and the unintended special ones among them."""
        encoding = encode_text(
            self._tokenizer, text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )
        cut_id = self._tokenizer.token_to_id(self._cut)
        meant_ids, special_ids = self._meant_ids, self._special_ids
        leaked = [
            token_id
            for token_id, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
            if token_id in special_ids and not is_added
        ]
        token_ids = [
            meant_ids.get(token_id, token_id) for token_id in encoding.ids if token_id != cut_id
        ]
        return token_ids, leaked

    def _with_aliases(self, text: str) -> str:
        return "".join(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[str]:
        [encoding] = self._finder.encode_batch([text], add_special_tokens=False)
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            name = self._finder.id_to_token(token_id) or ""
            yield self._aliases.get(name, text[start:end])


def _finder(added: Mapping[int, tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    """Returns a tokenizer that only splits text at added tokens.

    Text between them has the id 0.
    """
    rest = "\ue000"
    finder = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab={rest: 0}, unk_token=rest))
    finder.add_tokens(
        [
            tokenizers.AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
            )
            for token in added.values()
        ]
    )
    return finder
