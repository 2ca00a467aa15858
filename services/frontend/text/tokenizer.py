"""Converts text to token ids and back, with Hugging Face tokenizer files."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import tokenizers

from services.frontend.text.content_marks import MarkedText
from services.frontend.text.library_errors import EncodingError, encode_text, library_errors
from services.frontend.text.literal_encoder import LiteralEncoder
from services.frontend.text.token_bytes import UnknownDecoderError, token_bytes
from services.frontend.text.tokenizer_threads import TokenizerThreads

INLINE_ENCODE_CHARACTERS = 2048
"""Longer texts are encoded in a thread; this length takes 0.3 to 1.3 ms with the embedded model."""
MAX_TOKEN_IDS = 2**22
"""Limit of the vocabulary, far above any released model."""
INLINE_DECODE_TOKENS = 8192
"""More tokens are decoded in a thread."""


class TokenizerFilesError(Exception):
    """The tokenizer files cannot be used; the message says which and why."""


class Tokenizer:
    """A model's tokenizer.

    It parses special tokens in text unless told otherwise; see `encode`.
    """

    def __init__(self, files: Mapping[str, bytes], *, vocab_size: int = 0) -> None:
        """Reads the tokenizer.

        Raises:
            TokenizerFilesError: tokenizer.json is missing or unusable.
        """
        try:
            content = files["tokenizer.json"]
        except KeyError:
            raise TokenizerFilesError("the tokenizer has no tokenizer.json") from None
        with library_errors(TokenizerFilesError, "tokenizer.json cannot be read"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._literal = LiteralEncoder(content)
        size = max(vocab_size, 1 + max(self._tokenizer.get_vocab().values(), default=-1))
        if size > MAX_TOKEN_IDS:
            raise TokenizerFilesError(
                f"token ids up to {size - 1} need tables of as many entries; the limit is "
                f"{MAX_TOKEN_IDS} ids"
            )
        _check_added_ids(self._tokenizer, size)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._shown = _token_bytes(self._tokenizer, content, size)
        self._hidden = [
            b"" if token_id in self._special else shown
            for token_id, shown in enumerate(self._shown)
        ]

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return len(self._shown)

    @property
    def special_tokens(self) -> Sequence[str]:
        """The spellings of special tokens."""
        return self._literal.special_tokens

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

    async def encode(
        self,
        text: str | MarkedText,
        *,
        add_special_tokens: bool,
        parse_special_tokens: bool = True,
        check_length: Callable[[int], None] | None = None,
        threads: TokenizerThreads | None = None,
    ) -> list[int]:
        """Encodes text without blocking other requests.

        Args:
            text: the text; in a marked prompt, special tokens do not span marks.
            add_special_tokens: adds the model's tokens around a plain prompt.
            parse_special_tokens: whether spellings in unmarked text are special tokens.
            check_length: gets the number of tokens before the list is built; may raise.
            threads: threads for long texts; None encodes every text at once.

        Raises:
            EncodingError: the text, or a spelling in it, cannot be encoded.
            OverloadedError: too many long texts wait.
        """
        if isinstance(text, MarkedText):
            encode = partial(self._encode_marked, text, add_special_tokens, check_length)
            length = len(text.text)
        else:
            one_of = self._encode if parse_special_tokens else self._encode_literally
            encode = partial(one_of, text, add_special_tokens, check_length)
            length = len(text)
        if threads is None or length <= INLINE_ENCODE_CHARACTERS:
            return encode()
        return await threads.run(length, encode)

    async def decode(
        self,
        token_ids: Sequence[int],
        *,
        show_special_tokens: bool,
        threads: TokenizerThreads | None = None,
    ) -> str:
        """Decodes token ids, all below `vocab_size`; broken characters become U+FFFD.

        Like `encode`, it does not block other requests.
        """
        ids = list(token_ids)
        decode = partial(self._decode, ids, show_special_tokens)
        if threads is None or len(ids) <= INLINE_DECODE_TOKENS:
            return decode()
        return await threads.run(len(ids), decode)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token separately; broken characters become U+FFFD."""
        return [self._shown[token_id].decode("utf-8", "replace") for token_id in token_ids]

    def _encode_marked(
        self,
        prompt: MarkedText,
        add_special_tokens: bool,
        check_length: Callable[[int], None] | None,
    ) -> list[int]:
        text = self._literal.unmarked(prompt)
        if text is not None:
            return self._encode(text, add_special_tokens, check_length)
        return self._literal.encode(
            prompt, add_special_tokens=add_special_tokens, check_length=check_length
        )

    def _encode_literally(
        self, text: str, add_special_tokens: bool, check_length: Callable[[int], None] | None
    ) -> list[int]:
        return self._literal.encode(
            text, add_special_tokens=add_special_tokens, check_length=check_length
        )

    def _encode(
        self, text: str, add_special_tokens: bool, check_length: Callable[[int], None] | None
    ) -> list[int]:
        encoding = encode_text(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if check_length is not None:
            check_length(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def _decode(self, token_ids: list[int], show_special_tokens: bool) -> str:
        [text] = self._tokenizer.decode_batch(
            [token_ids], skip_special_tokens=not show_special_tokens
        )
        return str(text)


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


def _token_bytes(tokenizer: tokenizers.Tokenizer, content: bytes, size: int) -> list[bytes]:
    """Returns the bytes of token ids 0 to size - 1, as the tokenizer's decoder would join them."""
    tokens = [tokenizer.id_to_token(token_id) or "" for token_id in range(size)]
    try:
        return token_bytes(tokens, json.loads(content).get("decoder"))
    except UnknownDecoderError as error:
        raise TokenizerFilesError(f"tokenizer.json has {error}") from None
