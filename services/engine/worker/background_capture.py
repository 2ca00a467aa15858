"""Captures graphs while a worker serves, without holding up its steps for long."""

import time
from collections.abc import Callable

from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.worker.worker_graphs import WorkerGraphs

SERVING_SHARE = 4.0
"""Under load, serving gets this many times the time that the last capture took before the next."""


class BackgroundCapture:
    """Says when the next graph may be captured, and captures it.

    An idle worker captures one after the other. Under load captures take at most a fifth of the
    time, and a step waits for one capture at the most.
    """

    def __init__(
        self, graphs: WorkerGraphs, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._graphs = graphs
        self._clock = clock
        self._next_s = clock()

    @property
    def has_work(self) -> bool:
        """Whether there are graphs left to capture."""
        return self._graphs.num_pending > 0

    def is_due(self, *, is_idle: bool) -> bool:
        """Whether to capture now.

        Args:
            is_idle: no step runs and none was ordered.
        """
        return self.has_work and (is_idle or self._clock() >= self._next_s)

    def run(self) -> GraphOutcome:
        """Captures one graph."""
        started_s = self._clock()
        outcome = self._graphs.capture_next()
        ended_s = self._clock()
        self._next_s = ended_s + SERVING_SHARE * (ended_s - started_s)
        return outcome
