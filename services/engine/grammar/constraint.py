"""One request's state in its grammar."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

from llguidance import LLMatcher

from services.engine.errors import (
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestFaultError,
)
from services.engine.grammar.grammar_text import shown

RETRY_AFTER_MS = 1000
FIELD = "structured_output"
"""The field of a request that has its grammar."""


class GrammarConstraint:
    """Advances in a grammar by chosen tokens and computes masks in threads; see `Constraint`.

    It outlives preemptions, as it depends only on tokens.
    """

    __slots__ = (
        "_deadline", "_has_begun", "_is_closed", "_mask", "_mask_bytes", "_matcher", "_on_close",
        "_on_end", "_on_failure", "_on_mask", "_threads", "_timeout_s",
    )  # fmt: skip

    def __init__(
        self,
        matcher: LLMatcher,
        mask: bytes,
        *,
        threads: Executor,
        timeout_s: float,
        on_failure: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        """Starts before the first token.

        Args:
            matcher: the grammar's, used only here.
            mask: the first token's.
            threads: compute masks.
            timeout_s: time limit of a mask, which ends the request.
            on_failure: called when the grammar cannot continue.
            on_close: called once, when the request has ended.
        """
        self._matcher: LLMatcher | None = matcher
        self._mask: bytes | None = mask
        self._mask_bytes = len(mask)
        self._threads = threads
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._on_close = on_close
        self._is_closed = self._has_begun = False
        self._deadline: asyncio.TimerHandle | None = None
        self._on_mask: Callable[[], None] = _ignore
        self._on_end: Callable[[EngineError | None], None] = _ignore_end

    @property
    def mask(self) -> bytes | None:
        """The next token's bits; None until computed."""
        return self._mask

    @property
    def num_free_tokens(self) -> int:
        """No token may come without a mask."""
        return 0

    def listen(
        self, on_mask: Callable[[], None], on_end: Callable[[EngineError | None], None]
    ) -> None:
        """Calls `on_mask` for each new mask and `on_end` once, on the event loop."""
        self._on_mask, self._on_end = on_mask, on_end

    def advance(self, token_id: int) -> None:
        """Takes the chosen token and starts to compute the next mask."""
        matcher = self._matcher
        if matcher is None:
            return  # the request has ended meanwhile
        self._mask = None
        self._has_begun = False
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._timeout_s, self._give_up)
        # Nothing waits for the future: its outcome comes back through the callback alone.
        work = self._threads.submit(self._walk, matcher, token_id)
        work.add_done_callback(partial(self._hand_over, loop))

    def close(self) -> None:
        """Releases the grammar and the request; ends all callbacks."""
        if self._is_closed:
            return
        self._is_closed = True
        self._matcher = self._mask = None
        self._cancel_deadline()
        on_close = self._on_close
        # These refer to the request, which refers to its constraint.
        self._on_mask, self._on_end = _ignore, _ignore_end
        self._on_failure = self._on_close = _ignore
        on_close()

    def _walk(self, matcher: LLMatcher, token_id: int) -> bytes | EngineError | None:
        """Advances by one token; returns the next mask, None if nothing can follow."""
        if self._is_closed:
            return None  # the request ended while this waited for a thread
        self._has_begun = True
        try:
            matcher.consume_token(token_id)
            if not matcher.is_error():
                if matcher.is_stopped():
                    return None
                mask = next_mask(matcher, self._mask_bytes)
                if mask is not None:
                    return mask
            reason = shown(matcher.get_error()) if matcher.is_error() else "no token fits"
        except BaseException as error:  # noqa: BLE001  a panic of the Rust library is one
            return RequestFaultError(f"the grammar's library failed: {error!r}")
        return InvalidRequestError(
            f"the output cannot follow its grammar any further: {reason}", field=FIELD
        )

    def _hand_over(
        self, loop: asyncio.AbstractEventLoop, work: "Future[bytes | EngineError | None]"
    ) -> None:
        """Passes a thread's outcome to the event loop."""
        if not work.cancelled() and not loop.is_closed():
            loop.call_soon_threadsafe(self._take, work.result())

    def _take(self, outcome: bytes | EngineError | None) -> None:
        if self._deadline is None:
            return  # it was given up or closed
        self._cancel_deadline()
        if isinstance(outcome, bytes):
            self._mask = outcome
            self._on_mask()
        elif outcome is None:
            self._on_end(None)
        else:
            self._on_failure()
            self._on_end(outcome)

    def _give_up(self) -> None:
        self._deadline = None
        if not self._has_begun:  # other grammars held all threads
            self._on_end(
                QueueFullError(
                    f"the output waited {self._timeout_s} s for a thread to follow its grammar",
                    retry_after_ms=RETRY_AFTER_MS,
                )
            )
            return
        self._on_failure()
        self._on_end(
            InvalidRequestError(
                f"the grammar took more than {self._timeout_s} s for one token", field=FIELD
            )
        )

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def next_mask(matcher: LLMatcher, num_bytes: int) -> bytes | None:
    """Returns a bit for each token that may come next, None if there is none or on an error."""
    mask = matcher.compute_bitmask()[:num_bytes].ljust(num_bytes, b"\0")
    return mask if any(mask) and not matcher.is_error() else None


def _ignore() -> None:
    pass


def _ignore_end(error: EngineError | None) -> None:
    del error
