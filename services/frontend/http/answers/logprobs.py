"""Log-probabilities: of outputs in OpenAI's two forms, of prompts in vLLM's."""

from typing import Any

from typing_extensions import TypedDict

from services.frontend.engine_client.messages import PositionLogprobs
from services.frontend.pipeline.request import Output
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


class PromptField(TypedDict, total=False):
    """The field with the log-probabilities of a prompt, which vLLM's server has."""

    prompt_logprobs: list[dict[str, Any] | None]


class PromptLogprobs:
    """Log-probabilities of a prompt, by token id."""

    def __init__(self, tokenizer: Tokenizer, *, are_told: bool) -> None:
        """Uses the model's tokenizer; without `are_told` there is no field."""
        self._token_bytes = tokenizer.token_bytes(show_special_tokens=True)
        self._are_told = are_told

    def field(self, first: Output) -> PromptField:
        """Returns the field of a prompt, of which `first` is the first output.

        The first token has none, and unlisted tokens have no rank.
        """
        if not self._are_told:
            return {}
        entries = [self._entry(position) for position in first.prompt_logprobs]
        return {"prompt_logprobs": [None, *entries]}

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
