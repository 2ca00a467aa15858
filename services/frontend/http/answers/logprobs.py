"""Log-probabilities: of outputs in OpenAI's two forms, of prompts in vLLM's."""

from collections.abc import Sequence
from typing import Any

from services.frontend.engine_client.messages import PositionLogprobs
from services.frontend.pipeline.request import Output
from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks."""


def shown_positions(output: Output) -> list[PositionLogprobs]:
    """Returns the positions in the text, without a stop token that it does not show."""
    positions = output.logprobs
    hides_last = output.stop_token_id is not None and not output.shows_stop_token
    return positions[: len(output.token_ids) - 1] if hides_last else positions


class ChatLogprobs:
    """Log-probabilities of a chat completion."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Uses the model's tokenizer."""
        self._token_bytes = tokenizer.token_bytes(show_special_tokens=True)

    def push(self, output: Output) -> dict[str, Any]:
        """Returns those of new output."""
        return {
            "content": [
                {
                    **self._entry(position.chosen),
                    "top_logprobs": [self._entry(token) for token in position.top],
                }
                for position in shown_positions(output)
            ],
            "refusal": None,
        }

    def _entry(self, token: Any) -> dict[str, Any]:
        content = self._token_bytes[token.token_id]
        return {
            "token": content.decode("utf-8", "replace"),
            "logprob": max(token.logprob, LOWEST_LOGPROB),
            "bytes": list(content),
        }


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
        self,
        told: dict[str, Any],
        token_id: int,
        position: PositionLogprobs | None,
        offset: int,
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


class PromptLogprobs:
    """Log-probabilities of a prompt, by token id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Uses the model's tokenizer."""
        self._token_bytes = tokenizer.token_bytes(show_special_tokens=True)

    def of(self, first: Output) -> list[dict[str, Any] | None]:
        """Returns those of a prompt, of which `first` is the first output.

        The first token has none, and unlisted tokens have no rank.
        """
        return [None, *(self._entry(position) for position in first.prompt_logprobs)]

    def _entry(self, position: PositionLogprobs) -> dict[str, Any]:
        entry = {str(position.chosen.token_id): self._told(position.chosen, None)}
        for rank, token in enumerate(position.top, 1):
            entry[str(token.token_id)] = self._told(token, rank)
        return entry

    def _told(self, token: Any, rank: int | None) -> dict[str, Any]:
        return {
            "logprob": max(token.logprob, LOWEST_LOGPROB),
            "rank": rank,
            "decoded_token": self._token_bytes[token.token_id].decode("utf-8", "replace"),
        }
