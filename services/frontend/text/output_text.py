"""The text of one request's output, from tokens to what may be shown."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What some tokens led to."""

    text: str
    """New text, whole characters only."""
    num_tokens: int
    """How many of the tokens belong to the output; a stop string leaves out those behind it."""
    stop_string: str | None = None
    """The stop string that ended the output, if one did."""


class OutputText:
    """Detokenizes and watches for stop strings."""

    def __init__(
        self, detokenizer: Detokenizer, stop_strings: StopStrings, *, min_tokens: int = 0
    ) -> None:
        """Starts an output; what its first `min_tokens` tokens complete is no stop string."""
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._num_unstoppable = min_tokens

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Takes more tokens. After a piece with a stop string, nothing more may be pushed."""
        if not self._stop_strings:
            return TextPiece(self._detokenizer.push(token_ids), len(token_ids))
        shown = []
        for index, token_id in enumerate(token_ids):  # one by one, to know the token that ends it
            may_end = self._num_unstoppable == 0
            self._num_unstoppable -= not may_end
            scan = self._stop_strings.push(self._detokenizer.push((token_id,)), may_end=may_end)
            shown.append(scan.text)
            if scan.stop_string is not None:
                return TextPiece("".join(shown), index + 1, scan.stop_string)
        return TextPiece("".join(shown), len(token_ids))

    def finish(self) -> TextPiece:
        """Ends the output: the text that was held back, and U+FFFD for half a character."""
        may_end = self._num_unstoppable == 0
        scan = self._stop_strings.push(self._detokenizer.flush(), may_end=may_end)
        if scan.stop_string is not None:
            return TextPiece(scan.text, 0, scan.stop_string)
        return TextPiece(scan.text + self._stop_strings.flush(), 0)
