"""The reply that one request's output is: its content, reasoning and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.reply.deltas import CallPiece, Content, Delta, piece_of
from services.frontend.reply.reply_reader import ReplyReader
from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.output_text import TextPiece
from services.frontend.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyTextPiece(TextPiece):
    """More of a reply; its text is content."""

    reasoning: str = ""
    calls: Sequence[CallPiece] = ()


class ReplyText:
    """Detokenizes output, reads it as a reply, and searches its content for stop strings."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        reader: ReplyReader,
        stop_strings: StopStrings,
        *,
        min_tokens: int = 0,
    ) -> None:
        """Starts an output; its first `min_tokens` tokens complete no stop string."""
        self._detokenizer = detokenizer
        self._reader = reader
        self._stop_strings = stop_strings
        self._num_unstoppable = min_tokens
        self._num_held = 0
        self.num_reasoning_tokens = 0
        """Tokens of reasoning so far, without those of its markers."""

    def push(self, token_ids: Sequence[int]) -> ReplyTextPiece:
        """Takes tokens. Must not be called after a stop string."""
        deltas: list[Delta] = []
        for index, token_id in enumerate(token_ids):  # to know what each token belongs to
            was_reasoning = self._reader.is_reasoning
            news = self._reader.push(self._detokenizer.push((token_id,)))
            if was_reasoning:
                self._count_reasoning()
            may_end = self._num_unstoppable == 0
            self._num_unstoppable -= not may_end
            stop_string = self._add(news, deltas, may_end=may_end)
            if stop_string is not None:
                return _piece(deltas, index + 1, stop_string)
        return _piece(deltas, len(token_ids))

    def finish(self, *, is_cut: bool) -> ReplyTextPiece:
        """Ends the output: returns the held text, with U+FFFD for a partial character.

        With `is_cut` the reply was to go on: half a marker at its end is dropped.
        """
        news = self._reader.push(self._detokenizer.flush()) + self._reader.finish(is_cut=is_cut)
        self.num_reasoning_tokens += self._num_held
        deltas: list[Delta] = []
        stop_string = self._add(news, deltas, may_end=self._num_unstoppable == 0)
        if stop_string is None and (held := self._stop_strings.flush()):
            deltas.append(Content(held))
        return _piece(deltas, 0, stop_string)

    def _add(self, news: Sequence[Delta], deltas: list[Delta], *, may_end: bool) -> str | None:
        """Appends new deltas, up to a stop string in content, which is returned."""
        if not self._stop_strings:
            deltas += news
            return None
        for delta in news:
            if not isinstance(delta, Content):
                if held := self._stop_strings.flush():  # no stop string spans a call
                    deltas.append(Content(held))
                deltas.append(delta)
                continue
            scan = self._stop_strings.push(delta.text, may_end=may_end)
            deltas.append(Content(scan.text))
            if scan.stop_string is not None:
                return scan.stop_string
        return None

    def _count_reasoning(self) -> None:
        """Counts a token; one that may belong to the closing marker waits for the next."""
        if not self._reader.is_reasoning:
            self._num_held = 0
            return
        self._num_held += 1
        if not self._reader.is_holding:
            self.num_reasoning_tokens += self._num_held
            self._num_held = 0


def _piece(
    deltas: Sequence[Delta], num_tokens: int, stop_string: str | None = None
) -> ReplyTextPiece:
    piece = piece_of(deltas)
    return ReplyTextPiece(
        piece.content, num_tokens, stop_string, reasoning=piece.reasoning, calls=piece.calls
    )
