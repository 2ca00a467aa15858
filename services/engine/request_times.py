"""Where the time of a request goes."""

import enum
import time


class Stage(enum.Enum):
    """The activity of a request, or the cause of its waiting.

    protos/common/v1/request_story.proto says more of each.
    """

    PREPARED = "prepared"
    QUEUED = "queued"
    FULL_STEP = "full step"
    FULL_ROWS = "full rows"
    FULL_CACHE = "full cache"
    SAME_PREFIX = "same prefix"
    GRAMMAR = "grammar"
    IMAGE = "image"
    LOADING = "loading"
    ADAPTER = "adapter"
    ALONE = "alone"
    NO_WORKER = "no worker"
    PREFILL = "prefill"
    DECODE = "decode"


class RequestTimes:
    """The seconds of a request by stage. Times are seconds of `time.monotonic()`."""

    __slots__ = ("_seconds", "_since_s", "num_recomputed_tokens", "stage")

    def __init__(self, arrival_s: float) -> None:
        """Starts at the arrival, while the request is prepared."""
        self.stage = Stage.PREPARED
        """The present stage."""
        self.num_recomputed_tokens = 0
        """Tokens that were computed and lost, by preemptions and with workers."""
        self._since_s = arrival_s
        self._seconds: dict[Stage, float] = {}

    def enter(self, stage: Stage, at_s: float | None = None) -> None:
        """Changes the stage, now or at a given time; the same one goes on."""
        if stage is self.stage:
            return
        now_s = time.monotonic() if at_s is None else at_s
        self._seconds[self.stage] = self.seconds(now_s)[self.stage]
        self.stage, self._since_s = stage, now_s

    def seconds(self, now_s: float) -> dict[Stage, float]:
        """Returns the seconds of each stage so far, in the order in which they first came."""
        so_far = self._seconds.get(self.stage, 0.0) + max(0.0, now_s - self._since_s)
        return self._seconds | {self.stage: so_far}
