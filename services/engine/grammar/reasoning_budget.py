"""A limit of the reasoning at the start of an output."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLTokenizer

from services.engine.constraint import Constraint
from services.engine.errors import EngineError
from services.engine.grammar.tagged import Tokens, pieces_of
from services.engine.request import UNBOUNDED


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts around reasoning, in the forms that a budget needs."""

    begin: bytes
    """Empty: the output begins inside the reasoning."""
    end: bytes
    """The text that ends it."""
    forced_token_ids: tuple[int, ...]
    """Tokens that end it and lead to the answer."""

    @classmethod
    def of(
        cls, preamble: tuple[str, str], tokenizer: LLTokenizer, special: Tokens
    ) -> "ReasoningMarkers":
        """Encodes the begin and end of a preamble."""
        begin, end = preamble
        pieces = pieces_of(end, special)
        forced = [
            token_id
            for piece in pieces
            for token_id in (
                [special[piece]] if piece in special else tokenizer.tokenize_str(piece)
            )
        ]
        return cls(begin.encode(), pieces[0].encode(), tuple(forced))


class _Phase(enum.Enum):
    """The part of the output that the next token belongs to."""

    UNDECIDED = enum.auto()
    REASONING = enum.auto()
    FORCED = enum.auto()
    ANSWER = enum.auto()


class ReasoningBudget:
    """Counts reasoning tokens and forces the end at the limit; see `Constraint`.

    Tokens before the limit need no mask, unless the output has a grammar.
    """

    __slots__ = (
        "_decode", "_inner", "_markers", "_num_forced", "_num_left", "_num_words", "_phase",
        "_seen",
    )  # fmt: skip

    def __init__(
        self,
        markers: ReasoningMarkers,
        max_tokens: int,
        decode: Callable[[list[int]], bytes],
        *,
        vocab_size: int,
        inner: Constraint | None = None,
    ) -> None:
        """Starts before the first token.

        Args:
            markers: the texts around the reasoning.
            max_tokens: most tokens between them.
            decode: converts tokens to text.
            vocab_size: the model's.
            inner: the grammar of the whole output, reasoning included.
        """
        self._markers = markers
        self._num_left = max_tokens
        self._decode = decode
        self._inner = inner
        self._num_words = -(-vocab_size // 32)
        self._num_forced = 0
        self._seen = b""
        self._phase = _Phase.UNDECIDED
        if not markers.begin:
            self._begin(b"")

    @property
    def mask(self) -> bytes | None:
        """The next token's bits; None until computed, and where all may come."""
        allowed = None if self._inner is None else self._inner.mask
        if self._phase is not _Phase.FORCED or (self._inner is not None and allowed is None):
            return allowed
        token_id = self._markers.forced_token_ids[self._num_forced]
        if allowed is not None and not allowed[token_id // 8] >> token_id % 8 & 1:
            return allowed  # a character is not complete
        mask = bytearray(4 * self._num_words)
        mask[token_id // 8] = 1 << token_id % 8
        return bytes(mask)

    @property
    def num_free_tokens(self) -> int:
        """How many next tokens need no mask, at least."""
        if self._inner is not None or self._phase is _Phase.FORCED:
            return 0
        if self._phase is _Phase.ANSWER:
            return UNBOUNDED
        return self._num_left + (self._phase is _Phase.UNDECIDED)

    def listen(
        self, on_mask: Callable[[], None], on_end: Callable[[EngineError | None], None]
    ) -> None:
        """Passes the grammar's calls on."""
        if self._inner is not None:
            self._inner.listen(on_mask, on_end)

    def advance(self, token_id: int) -> None:
        """Takes the chosen token."""
        self.count(token_id)
        if self._inner is not None:
            self._inner.advance(token_id)

    def count(self, token_id: int) -> None:
        """Takes a token that the grammar already knows."""
        match self._phase:
            case _Phase.UNDECIDED:
                self._search_begin(token_id)
            case _Phase.REASONING:
                self._search_end(token_id)
            case _Phase.FORCED:
                self._follow(token_id)

    def close(self) -> None:
        """Releases the grammar."""
        if self._inner is not None:
            self._inner.close()

    def _search_begin(self, token_id: int) -> None:
        begin = self._markers.begin
        self._seen = (self._seen + self._decode([token_id])).lstrip()
        if self._seen.startswith(begin):
            self._begin(self._seen[len(begin) :])
        elif not begin.startswith(self._seen):
            self._phase, self._seen = _Phase.ANSWER, b""

    def _begin(self, seen: bytes) -> None:
        self._seen = seen
        self._phase = _Phase.REASONING if self._num_left else _Phase.FORCED

    def _search_end(self, token_id: int) -> None:
        if self._has_ended(token_id):
            self._phase = _Phase.ANSWER
            return
        self._num_left -= 1
        if not self._num_left:
            self._phase = _Phase.FORCED

    def _follow(self, token_id: int) -> None:
        forced = self._markers.forced_token_ids
        if token_id == forced[self._num_forced]:
            self._num_forced += 1
            if self._num_forced == len(forced):
                self._phase = _Phase.ANSWER
        elif self._has_ended(token_id):
            self._phase = _Phase.ANSWER

    def _has_ended(self, token_id: int) -> bool:
        """Whether a token completes the text that ends the reasoning."""
        end = self._markers.end
        seen = self._seen + self._decode([token_id])
        self._seen = seen[-(len(end) - 1) :] if len(end) > 1 else b""
        return end in seen
