"""Converts text to token ids and back, with Hugging Face tokenizer files."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tokenizers

from services.frontend.text.encoder import Encoder
from services.frontend.text.library_errors import EncodingError, encode_text, library_errors
from services.frontend.text.longest_token import longest_token_bytes
from services.frontend.text.token_bytes import UnknownDecoderError, token_bytes

MAX_TOKEN_IDS = 2**22
"""Limit of the vocabulary, far above any released model."""


class TokenizerFilesError(Exception):
    """The tokenizer files cannot be used; the message says which and why."""


class Tokenizer(Encoder):
    """A model's tokenizer, with tables of its tokens."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        vocab_size: int = 0,
        image_token_ids: Collection[int] = (),
    ) -> None:
        """Reads the tokenizer; texts cannot spell the tokens that stand for images.

        Raises:
            TokenizerFilesError: tokenizer.json is missing or unusable.
        """
        try:
            content = files["tokenizer.json"]
        except KeyError:
            raise TokenizerFilesError("the tokenizer has no tokenizer.json") from None
        for token_id in image_token_ids:
            content = _with_special(content, token_id)
        with library_errors(TokenizerFilesError, "tokenizer.json cannot be read"):
            super().__init__(content)
        parts: Mapping[str, Any] = json.loads(content)
        self.longest_token_bytes = longest_token_bytes(parts)
        """Most bytes of text that one token stands for; None if there is no limit."""
        self.content = content
        """The tokenizer.json."""
        size = max(vocab_size, 1 + max(self.library.get_vocab().values(), default=-1))
        if size > MAX_TOKEN_IDS:
            raise TokenizerFilesError(
                f"token ids up to {size - 1} need tables of as many entries; the limit is "
                f"{MAX_TOKEN_IDS} ids"
            )
        _check_added_ids(self.library, size)
        added = self.library.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._shown = _token_bytes(self.library, parts, size)
        self._hidden = [
            b"" if token_id in self._special else shown
            for token_id, shown in enumerate(self._shown)
        ]

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return len(self._shown)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is an added one that texts of callers cannot spell."""
        return token_id in self._special

    def token_bytes(self, *, show_special_tokens: bool) -> Sequence[bytes]:
        """Returns the UTF-8 bytes of each token id; a token may hold part of a character."""
        return self._shown if show_special_tokens else self._hidden

    def token_bytes_with(self, shown: Collection[str]) -> Sequence[bytes]:
        """Returns the bytes of each token id; of special tokens, only those of some spellings."""
        visible = {i: text for i, text in self._special.items() if text in shown}
        if not visible:
            return self._hidden
        table = list(self._hidden)
        for token_id in visible:
            table[token_id] = self._shown[token_id]
        return table

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token separately; broken characters become U+FFFD."""
        return [self._shown[token_id].decode("utf-8", "replace") for token_id in token_ids]


def _with_special(content: bytes, token_id: int) -> bytes:
    """Returns a tokenizer.json in which an added token is a special one."""
    with library_errors(TokenizerFilesError, "tokenizer.json cannot be read"):
        parts = json.loads(content)
        token = next((each for each in parts["added_tokens"] if each["id"] == token_id), None)
    if token is None or token["special"]:
        return content
    token["special"] = True
    return json.dumps(parts).encode()


def _check_added_ids(tokenizer: tokenizers.Tokenizer, size: int) -> None:
    """Refuses a tokenizer that adds unknown tokens around a text, or fails to add any."""
    try:
        ids = encode_text(tokenizer, "", add_special_tokens=True).ids
    except EncodingError as error:
        raise TokenizerFilesError(f"tokenizer.json cannot be used: {error}") from None
    if max(ids, default=0) >= size:
        raise TokenizerFilesError(
            f"tokenizer.json adds the token id {max(ids)} to a text; ids are below {size}"
        )


def _token_bytes(
    tokenizer: tokenizers.Tokenizer, parts: Mapping[str, Any], size: int
) -> list[bytes]:
    """Returns the bytes of token ids 0 to size - 1, as the tokenizer's decoder would join them."""
    tokens = [tokenizer.id_to_token(token_id) or "" for token_id in range(size)]
    try:
        return token_bytes(tokens, parts.get("decoder"))
    except UnknownDecoderError as error:
        raise TokenizerFilesError(f"tokenizer.json has {error}") from None
