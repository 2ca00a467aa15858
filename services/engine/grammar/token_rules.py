"""Rules of a request about single tokens and sequences of them, beside its grammar."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from services.engine.constraint import Constraint
from services.engine.errors import EngineError
from services.engine.request import UNBOUNDED, SamplingParams


def with_token_rules(
    sampling: SamplingParams,
    constraint: Constraint | None,
    token_ids: Sequence[int],
    *,
    vocab_size: int,
) -> Constraint | None:
    """Returns a constraint that also keeps the token rules of `sampling`; the same if it has none.

    Args:
        sampling: the request's.
        constraint: its grammar, after `token_ids`; None for none.
        token_ids: output that another engine made.
        vocab_size: the model's.
    """
    if sampling.allowed_tokens is None and not sampling.forbidden_sequences:
        return constraint
    forbidden = ForbiddenSequences(sampling.forbidden_sequences)
    for token_id in token_ids:
        forbidden.advance(token_id)
    return TokenRules(sampling.allowed_tokens, forbidden, vocab_size=vocab_size, inner=constraint)


class ForbiddenSequences:
    """Finds the tokens that would complete a sequence, in constant time per token.

    Source: Aho and Corasick 1975, "Efficient string matching". A state is a beginning of some
    sequences, the longest that the output ends with.
    """

    __slots__ = ("_fallbacks", "_lasts", "_num_left", "_state", "_steps")

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        """Takes sequences of two tokens or more; the output is empty."""
        self._steps: list[dict[int, int]] = [{}]
        """The longer beginnings of each state, by the next token."""
        self._lasts: list[frozenset[int]] = [frozenset()]
        """Tokens that complete a sequence."""
        self._num_left = [UNBOUNDED]
        """Fewest tokens that complete one."""
        self._fallbacks = [0]
        """The longest shorter beginning that a state ends with."""
        self._state = 0
        for sequence in sequences:
            self._add(sequence)
        self._link()

    @property
    def last_token_ids(self) -> frozenset[int]:
        """Tokens that may not come next."""
        return self._lasts[self._state]

    @property
    def num_free_tokens(self) -> int:
        """Tokens that may come next without completing a sequence, whatever they are."""
        return self._num_left[self._state] - 1

    def advance(self, token_id: int) -> None:
        """Takes the next token of the output."""
        self._state = self._after(self._state, token_id)

    def _add(self, sequence: Sequence[int]) -> None:
        state = 0
        for index, token_id in enumerate(sequence):
            self._num_left[state] = min(self._num_left[state], len(sequence) - index)
            if index == len(sequence) - 1:
                self._lasts[state] |= {token_id}
                break
            if token_id not in self._steps[state]:
                self._steps[state][token_id] = len(self._steps)
                self._steps.append({})
                self._lasts.append(frozenset())
                self._num_left.append(UNBOUNDED)
                self._fallbacks.append(0)
            state = self._steps[state][token_id]

    def _link(self) -> None:
        """Finds the fallbacks, shorter beginnings first; a state also has what they complete."""
        waiting = deque(self._steps[0].values())
        while waiting:
            state = waiting.popleft()
            shorter = self._fallbacks[state]
            self._lasts[state] |= self._lasts[shorter]
            self._num_left[state] = min(self._num_left[state], self._num_left[shorter])
            for token_id, longer in self._steps[state].items():
                self._fallbacks[longer] = self._after(shorter, token_id)
                waiting.append(longer)

    def _after(self, state: int, token_id: int) -> int:
        while state and token_id not in self._steps[state]:
            state = self._fallbacks[state]
        return self._steps[state].get(token_id, 0)


class TokenRules:
    """Allows some tokens alone and completes no forbidden sequence; see `Constraint`."""

    __slots__ = ("_allowed", "_forbidden", "_inner", "_num_bytes")

    def __init__(
        self,
        allowed: bytes | None,
        forbidden: ForbiddenSequences,
        *,
        vocab_size: int,
        inner: Constraint | None,
    ) -> None:
        """Starts after the same tokens as the others.

        Args:
            allowed: a bit for each token that may come; None for all.
            forbidden: the sequences.
            vocab_size: the model's.
            inner: the request's grammar.
        """
        self._allowed = allowed
        self._forbidden = forbidden
        self._num_bytes = 4 * -(-vocab_size // 32)
        self._inner = inner

    @property
    def mask(self) -> bytes | None:
        """The next token's bits; None until the grammar's are computed."""
        inner, mask = self._inner, self._allowed
        if inner is not None and not inner.num_free_tokens:
            if inner.mask is None:
                return None
            mask = inner.mask if mask is None else _both(mask, inner.mask)
        lasts = self._forbidden.last_token_ids
        if mask is not None and not lasts:
            return mask
        return without(b"\xff" * self._num_bytes if mask is None else mask, lasts)

    @property
    def num_free_tokens(self) -> int:
        """How many next tokens need no mask, at least."""
        if self._allowed is not None:
            return 0
        own = self._forbidden.num_free_tokens
        return own if self._inner is None else min(own, self._inner.num_free_tokens)

    def listen(
        self, on_mask: Callable[[], None], on_end: Callable[[EngineError | None], None]
    ) -> None:
        """Passes the grammar's calls on."""
        if self._inner is not None:
            self._inner.listen(on_mask, on_end)

    def advance(self, token_id: int) -> None:
        """Takes the chosen token."""
        self._forbidden.advance(token_id)
        if self._inner is not None:
            self._inner.advance(token_id)

    def close(self) -> None:
        """Releases the grammar."""
        if self._inner is not None:
            self._inner.close()


def without(mask: bytes, token_ids: Iterable[int]) -> bytes:
    """Returns a mask that does not allow these tokens."""
    left = bytearray(mask)
    for token_id in token_ids:
        left[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(left)


def _both(one: bytes, other: bytes) -> bytes:
    """Returns the bits that two masks share."""
    shared = int.from_bytes(one, "little") & int.from_bytes(other, "little")
    return shared.to_bytes(len(one), "little")
