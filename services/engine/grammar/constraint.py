"""One request's place in its grammar."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from llguidance import LLMatcher

from services.engine.errors import EngineError, InvalidRequestError
from services.engine.grammar.grammar_text import shown


class GrammarConstraint:
    """Walks a grammar as tokens are chosen and works out masks in threads; see `Constraint`.

    It outlives preemptions: it knows the tokens, not the blocks.
    """

    __slots__ = (
        "__weakref__", "_deadline", "_mask", "_mask_bytes", "_matcher", "_on_end", "_on_failure",
        "_on_mask", "_threads", "_timeout_s",
    )  # fmt: skip

    def __init__(
        self,
        matcher: LLMatcher,
        mask: bytes,
        *,
        threads: Executor,
        timeout_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        """Starts where the first token is to be chosen.

        Args:
            matcher: the grammar's, which nobody else moves.
            mask: the first token's.
            threads: where masks are worked out.
            timeout_s: a mask that takes longer ends the request.
            on_failure: called when the grammar cannot go on.
        """
        self._matcher = matcher
        self._mask: bytes | None = mask
        self._mask_bytes = len(mask)
        self._threads = threads
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._deadline: asyncio.TimerHandle | None = None
        self._on_mask: Callable[[], None] = _ignore
        self._on_end: Callable[[EngineError | None], None] = _ignore_end

    @property
    def mask(self) -> bytes | None:
        """The next token's bits; None while they are not known."""
        return self._mask

    def listen(
        self, on_mask: Callable[[], None], on_end: Callable[[EngineError | None], None]
    ) -> None:
        """Calls `on_mask` for each new mask and `on_end` once, on the event loop."""
        self._on_mask, self._on_end = on_mask, on_end

    def advance(self, token_id: int) -> None:
        """Takes the token that was chosen; the mask behind it comes later."""
        self._mask = None
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._timeout_s, self._give_up)
        # Nobody waits for the future: its outcome comes back through the callback alone.
        self._threads.submit(self._walk, token_id).add_done_callback(
            lambda future: loop.call_soon_threadsafe(self._take, future.result())
        )

    def _walk(self, token_id: int) -> bytes | InvalidRequestError | None:
        """Moves on by one token; returns the next mask, None where nothing can follow."""
        matcher = self._matcher
        matcher.consume_token(token_id)
        if not matcher.is_error():
            if matcher.is_stopped():
                return None
            mask = next_mask(matcher, self._mask_bytes)
            if mask is not None:
                return mask
        reason = shown(matcher.get_error()) if matcher.is_error() else "no token fits"
        return InvalidRequestError(f"the output cannot follow its grammar any further: {reason}")

    def _take(self, outcome: bytes | InvalidRequestError | None) -> None:
        if self._deadline is None:
            return  # it was given up
        self._deadline.cancel()
        self._deadline = None
        if isinstance(outcome, bytes):
            self._mask = outcome
            self._on_mask()
        elif outcome is None:
            self._on_end(None)
        else:
            self._fail(outcome)

    def _give_up(self) -> None:
        self._deadline = None
        self._fail(
            InvalidRequestError(f"the grammar took more than {self._timeout_s} s for one token")
        )

    def _fail(self, error: InvalidRequestError) -> None:
        self._on_failure()
        self._on_end(error)


def next_mask(matcher: LLMatcher, num_bytes: int) -> bytes | None:
    """Returns a bit for each token that may come next, None if there is none or on an error."""
    mask = matcher.compute_bitmask()[:num_bytes].ljust(num_bytes, b"\0")
    return mask if any(mask) and not matcher.is_error() else None


def _ignore() -> None:
    pass


def _ignore_end(error: EngineError | None) -> None:
    del error
