"""Keeps requests away from an engine that fails them."""

import time
from collections.abc import Callable

import structlog

MAX_FAILURES = 5
"""Failures in a row that open the circuit."""
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0

log = structlog.get_logger()


class CircuitBreaker:
    """Closed, it lets everything pass. Open, it lets one request pass at the end of each pause.

    Failures in a row open it; a request that passed and fails doubles the pause; any success
    closes it. Source: Nygard, "Release It!", 2nd edition, section 5.2.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts closed.

        Args:
            name: the engine's address, for the log.
            clock: tells the time in seconds.
        """
        self._name = name
        self._clock = clock
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._probe_s: float | None = None
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """Whether requests are kept away."""
        return self._probe_s is not None

    @property
    def wait_s(self) -> float:
        """Seconds until a request may pass; 0 where one may now."""
        return 0.0 if self._probe_s is None else max(0.0, self._probe_s - self._clock())

    def note_sent(self) -> None:
        """Notes that a request passes; while open, that begins the next pause."""
        if self._probe_s is not None:
            self._is_probing = True
            self._probe_s = self._clock() + self._pause_s

    def note_success(self) -> None:
        """Notes that the engine works."""
        if self._probe_s is not None:
            log.info("engine_circuit_closed", address=self._name)
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._probe_s = None
        self._is_probing = False

    def note_failure(self) -> None:
        """Notes that the engine failed a request, or all of them at once."""
        self._num_failures += 1
        if self._num_failures < MAX_FAILURES:
            return
        if self._probe_s is not None:
            if not self._is_probing:
                return  # a request that was sent before it opened
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
            self._is_probing = False
        log.warning("engine_circuit_opened", address=self._name, pause_s=self._pause_s)
        self._probe_s = self._clock() + self._pause_s
