"""Keeps requests away from an engine that fails them."""

import time
from collections.abc import Callable

import structlog

MAX_FAILURES = 5
"""Consecutive failures that open the circuit."""
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0

log = structlog.get_logger()


class CircuitBreaker:
    """Passes every request while closed, and one request after each pause while open.

    Source: Nygard, "Release It!", 2nd edition, section 5.2.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts closed."""
        self._name = name
        self._clock = clock
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._probe_s: float | None = None
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """Whether requests are held back."""
        return self._probe_s is not None

    @property
    def wait_s(self) -> float:
        """Seconds until a request may pass; 0 if one may now."""
        return 0.0 if self._probe_s is None else max(0.0, self._probe_s - self._clock())

    def note_sent(self) -> None:
        """Notes that a request passes. While the circuit is open, the next pause begins."""
        if self._probe_s is not None:
            self._is_probing = True
            self._probe_s = self._clock() + self._pause_s

    def note_success(self) -> None:
        """Closes the circuit."""
        if self._probe_s is not None:
            log.info("engine_circuit_closed", address=self._name)
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._probe_s = None
        self._is_probing = False

    def note_failure(self) -> None:
        """Notes one failure, of a request or of all requests at once."""
        self._num_failures += 1
        if self._num_failures < MAX_FAILURES:
            return
        if self._probe_s is not None:
            if not self._is_probing:
                return  # a request sent before the circuit opened
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
            self._is_probing = False
        log.warning("engine_circuit_opened", address=self._name, pause_s=self._pause_s)
        self._probe_s = self._clock() + self._pause_s
