"""Captures graphs while a worker serves, with short delays for its steps."""

import time
from collections.abc import Callable

from protos.engine.v1.worker_pb2 import GraphOrder
from services.engine.compilation.graphs.capture_plan import read_key, wire_key
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.worker.graphs.background_compile import BackgroundCompile
from services.engine.worker.graphs.graph_set import GraphSet

SERVING_SHARE = 4.0
"""Under load, serving gets this multiple of the last slice's time before the next, if steps have
missed the graph."""
LEISURE_SHARE = 60.0
"""The multiple otherwise: about one step in three hundred waits."""

POLL_S = 2e-3
"""Pause between checks of a running compilation or test."""


class BackgroundCapture:
    """Decides when to capture the next graph, and captures it in slices between steps.

    An idle worker captures continuously, each graph while the device tests the last. Under load,
    graphs that steps have missed take at most a fifth of the time, others a sixtieth, and a step
    waits for at most one slice. While the model is compiled, only decodes that steps have missed
    are captured, and only in the compilation's pauses; it gives way to them.

    A single rank does what is `due` at once. Several ranks `obey` an order that all get when each
    has something due.
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
    def is_compiling(self) -> bool:
        """Whether the model is compiled, or was and does not run yet."""
        return self._compilation is not None

    @property
    def max_wait_s(self) -> float | None:
        """Longest time an idle worker may wait for a step; None for no limit."""
        if not self.has_work:
            return None
        return 0.0 if self.is_due(is_idle=True) else POLL_S

    def is_due(self, *, is_idle: bool) -> bool:
        """Whether something is `due` now, as far as this shows without holding up a compilation.

        Args:
            is_idle: no step is running or ordered.
        """
        compilation, graphs = self._compilation, self._graphs
        if compilation is not None and compilation.is_done:
            return True
        if compilation is not None:
            turns = compilation.turns
            turns.is_wanted = graphs.is_early and graphs.has_next
            if not (graphs.is_early and turns.compilation_waits):
                return False
        # The clock is the cheapest to ask, and every step asks.
        if not is_idle and self._clock() < self._next_s:
            return False
        max_under_test = self._max_under_test(is_idle)
        return graphs.has_next and not graphs.must_wait(max_under_test=max_under_test)

    def due(self, *, is_idle: bool) -> GraphOrder | None:
        """Returns what is to be done next, which `obey` does.

        Until then a compilation that waits is held up.

        Args:
            is_idle: as for `is_due`.

        Returns:
            The order; None if a compilation has stopped waiting meanwhile.
        """
        compilation, key = self._compilation, self._graphs.next_pending
        is_compiled = compilation is not None and compilation.is_done
        if compilation is not None and not is_compiled and not compilation.turns.hold_up():
            return None
        wired = None if key is None else wire_key(key)
        return GraphOrder(key=wired, is_idle=is_idle, is_compiled=is_compiled)

    def obey(self, order: GraphOrder) -> GraphOutcome | None:
        """Runs a slice of a capture, ends a test, or installs the compiled model.

        Args:
            order: what is due here, or was ordered of all ranks.

        Returns:
            The outcome of a finished graph, if any.
        """
        compilation = self._compilation
        if order.is_compiled and compilation is not None:
            self._graphs.end_early()
            compilation.install()
            self._compilation = None
            return None
        begins = order.HasField("key")
        if begins:
            self._graphs.capture_first(read_key(order.key))
        if compilation is None:
            return self._capture(is_idle=order.is_idle, begins=begins)
        try:
            return self._graphs.capture_slice(begins=begins)
        finally:
            compilation.turns.let_go()

    def begin_again(self) -> None:
        """Begins the captures under way again, after the weights have changed."""
        self._graphs.begin_again()

    def _capture(self, *, is_idle: bool, begins: bool) -> GraphOutcome | None:
        started_s = self._clock()
        share = SERVING_SHARE if self._graphs.is_next_missed else LEISURE_SHARE
        max_under_test = self._max_under_test(is_idle)
        outcome = self._graphs.capture_slice(max_under_test=max_under_test, begins=begins)
        ended_s = self._clock()
        self._next_s = ended_s + share * (ended_s - started_s)
        return outcome

    def _max_under_test(self, is_idle: bool) -> int:
        return 1 if is_idle and not self._graphs.is_early else 0
