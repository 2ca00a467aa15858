"""Captures graphs while a worker serves, with short delays for its steps."""

import time
from collections.abc import Callable

from protos.engine.v1.worker_pb2 import GraphOrder
from services.engine.compilation.graphs.capture_plan import read_key, wire_key
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.worker.graphs.background_compile import BackgroundCompile
from services.engine.worker.graphs.graph_set import GraphSet

SERVING_SHARE = 4.0
"""Under load, serving gets this multiple of the last capture's time before the next."""

COMPILE_POLL_S = 2e-3
"""Pause between checks of a running compilation."""


class BackgroundCapture:
    """Decides when to capture the next graph, and captures it.

    An idle worker captures continuously, each graph while the device tests the last. Under load,
    captures take at most a fifth of the time, and a step waits for at most one. Graphs contain the
    compiled model, so captures wait for a running compilation.
    """

    def __init__(
        self,
        graphs: GraphSet,
        *,
        compilation: BackgroundCompile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._graphs = graphs
        self._compilation = compilation
        self._clock = clock
        self._next_s = clock()

    @property
    def has_work(self) -> bool:
        """Whether a compilation or a capture is left."""
        return self._compilation is not None or self._graphs.num_pending > 0

    @property
    def max_wait_s(self) -> float | None:
        """Longest time an idle worker may wait for a step; None for no limit."""
        if self._compilation is not None:
            return COMPILE_POLL_S
        return 0.0 if self.has_work else None

    def is_due(self, *, is_idle: bool) -> bool:
        """Whether `run` has something to do now.

        Args:
            is_idle: no step is running or ordered.
        """
        if self._compilation is not None:
            return self._compilation.is_done
        return self.has_work and (is_idle or self._clock() >= self._next_s)

    @property
    def is_compiling(self) -> bool:
        """Whether `run` installs the compiled model next, which concerns no other rank."""
        return self._compilation is not None

    def due(self, *, is_idle: bool) -> GraphOrder:
        """Returns what `run` would do next, for all ranks to do at the same time."""
        key = self._graphs.next_pending
        return GraphOrder(key=None if key is None else wire_key(key), is_idle=is_idle)

    def obey(self, order: GraphOrder) -> GraphOutcome | None:
        """Does what all ranks were told, like `run`."""
        if order.HasField("key"):
            self._graphs.capture_first(read_key(order.key))
        return self.run(is_idle=order.is_idle)

    def run(self, *, is_idle: bool) -> GraphOutcome | None:
        """Captures one graph, or installs the compiled model.

        Args:
            is_idle: as for `is_due`.

        Returns:
            The outcome of a finished graph, if any.
        """
        if self._compilation is not None:
            self._compilation.install()
            self._compilation = None
            return None
        if is_idle:
            return self._graphs.capture_ahead()
        started_s = self._clock()
        outcome = self._graphs.capture_next()
        ended_s = self._clock()
        self._next_s = ended_s + SERVING_SHARE * (ended_s - started_s)
        return outcome
