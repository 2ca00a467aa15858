"""The text of one request's output."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The text of some tokens."""

    text: str
    """New whole characters."""
    num_tokens: int
    """Tokens that belong to the output; those after a stop string do not."""
    stop_string: str | None = None
    """The stop string that ended the output, if any."""


class OutputText:
    """Detokenizes output and searches for stop strings."""

    def __init__(
        self, detokenizer: Detokenizer, stop_strings: StopStrings, *, min_tokens: int = 0
    ) -> None:
        """Starts an output; its first `min_tokens` tokens complete no stop string."""
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._num_unstoppable = min_tokens

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Takes tokens. Must not be called after a stop string."""
        if not self._stop_strings:
            return TextPiece(self._detokenizer.push(token_ids), len(token_ids))
        shown = []
        for index, token_id in enumerate(
            token_ids
        ):  # one at a time, to know which token completes it
            may_end = self._num_unstoppable == 0
            self._num_unstoppable -= not may_end
            scan = self._stop_strings.push(self._detokenizer.push((token_id,)), may_end=may_end)
            shown.append(scan.text)
            if scan.stop_string is not None:
                return TextPiece("".join(shown), index + 1, scan.stop_string)
        return TextPiece("".join(shown), len(token_ids))

    def finish(self, *, is_cut: bool) -> TextPiece:
        """Ends the output: returns the held text, with U+FFFD for a partial character."""
        del is_cut  # text has no markers
        may_end = self._num_unstoppable == 0
        scan = self._stop_strings.push(self._detokenizer.flush(), may_end=may_end)
        if scan.stop_string is not None:
            return TextPiece(scan.text, 0, scan.stop_string)
        return TextPiece(scan.text + self._stop_strings.flush(), 0)
