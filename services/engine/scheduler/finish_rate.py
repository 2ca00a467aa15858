"""Estimates when a full queue has room again."""

from collections import deque

_NUM_RECENT = 64
_MIN_RETRY_MS = 50
_MAX_RETRY_MS = 5000
_UNKNOWN_RETRY_MS = 1000


class FinishRate:
    """Records when recent requests ended; each end makes room for a waiting request."""

    def __init__(self) -> None:
        self._finish_times_s: deque[float] = deque(maxlen=_NUM_RECENT)

    def record(self, now_s: float) -> None:
        """Records the end of a request."""
        self._finish_times_s.append(now_s)

    def retry_after_ms(self, now_s: float) -> int:
        """Returns the mean time between recent ends, in milliseconds from 50 to 5000."""
        if not self._finish_times_s:
            return _UNKNOWN_RETRY_MS
        mean_s = (now_s - self._finish_times_s[0]) / len(self._finish_times_s)
        return int(min(max(1000 * mean_s, _MIN_RETRY_MS), _MAX_RETRY_MS))
