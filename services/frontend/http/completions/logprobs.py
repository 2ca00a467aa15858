"""Log-probabilities of completions, with offsets into their texts."""

from collections.abc import Sequence
from typing import Any

from services.frontend.engine_client.messages import PositionLogprobs
from services.frontend.http.answers.logprobs import LOWEST_LOGPROB, shown_positions
from services.frontend.pipeline.request import Output
from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.tokenizer import Tokenizer


class CompletionLogprobs:
    """Log-probabilities of a completion, with offsets into its text."""

    def __init__(self, tokenizer: Tokenizer, *, show_special_tokens: bool) -> None:
        """Uses the model's tokenizer, and counts special tokens if the output's text has them."""
        self._token_bytes = tokenizer.token_bytes(show_special_tokens=True)
        self._visible_bytes = tokenizer.token_bytes(show_special_tokens=show_special_tokens)
        self._decoder = Detokenizer(self._visible_bytes)
        self._num_characters = 0
        self._echoed: Sequence[int] = ()
        self._echoed_offsets: Sequence[int] = ()
        self._has_echo = False

    def echo(self, token_ids: Sequence[int], offsets: Sequence[int], num_characters: int) -> None:
        """Prepends the prompt's tokens, which have some whole characters.

        From then on a stop token has an entry, too, even if the text does not show it: evaluations
        ask for one token after the prompt, and leave the last entry out.
        """
        self._has_echo = True
        self._echoed, self._echoed_offsets = token_ids, offsets
        self._decoder = Detokenizer(self._visible_bytes, token_ids)
        self._num_characters = num_characters

    def push(self, output: Output) -> dict[str, Any]:
        """Returns those of new output."""
        told: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if self._echoed:
            positions = [None, *output.prompt_logprobs]  # the first token has no predecessor
            for token_id, offset, position in zip(
                self._echoed, self._echoed_offsets, positions, strict=False
            ):
                self._add(told, token_id, position, offset)
            self._echoed = ()
        for position in output.logprobs if self._has_echo else shown_positions(output):
            token_id = position.chosen.token_id
            # A character that the tokens before have begun counts.
            offset = self._num_characters + self._decoder.is_inside_character
            self._add(told, token_id, position, offset)
            self._num_characters += len(self._decoder.push([token_id]))
        return told

    def _add(
        self, told: dict[str, Any], token_id: int, position: PositionLogprobs | None, offset: int
    ) -> None:
        """Appends one token."""
        told["tokens"].append(self._text(token_id))
        if position is None:
            told["token_logprobs"].append(None)
            told["top_logprobs"].append(None)
        else:
            told["token_logprobs"].append(max(position.chosen.logprob, LOWEST_LOGPROB))
            # As in OpenAI's API the token itself is there, even if it is not among the top.
            told["top_logprobs"].append(
                {
                    self._text(token.token_id): max(token.logprob, LOWEST_LOGPROB)
                    for token in (*position.top, position.chosen)
                }
            )
        told["text_offset"].append(offset)

    def _text(self, token_id: int) -> str:
        """Returns a token's text, or its bytes in hexadecimal if they are not whole characters."""
        content = self._token_bytes[token_id]
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Returns the offset in characters of each token in a prompt's text.

    A special token that the text omits has the offset of the next token.
    """
    shown = tokenizer.token_bytes(show_special_tokens=True)
    visible = tokenizer.token_bytes(show_special_tokens=False)
    decoder = Detokenizer(visible)
    offsets = []
    position = 0
    for token_id in token_ids:
        content = visible[token_id]
        has_begun = decoder.is_inside_character
        if content and not has_begun:
            position += _num_skipped(content, text, position)
        offsets.append(min(position + has_begun, len(text)))
        if not content:
            spelling = shown[token_id].decode("utf-8", "replace")
            position += len(spelling) if text.startswith(spelling, position) else 0
            continue
        position += len(decoder.push([token_id]))
        if content.startswith(b" ") and not text.startswith(" ", offsets[-1]):
            position -= 1  # sentencepiece adds a space before the first word
    return offsets


def _num_skipped(content: bytes, text: str, position: int) -> int:
    """Returns the length of whitespace that a preceding special token absorbed."""
    if content[:1].isspace():
        return 0
    skipped = 0
    while text[position + skipped : position + skipped + 1].isspace():
        skipped += 1
    return skipped
