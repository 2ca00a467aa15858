"""The worker's graphs: planned, captured and given up."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import structlog
import torch
from torch import Tensor

from models.cudagraph_mode import GraphKind
from models.forward_context import GraphKey
from services.engine.compilation.graphs.graph_runner import GraphOutcome, StartedCapture
from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.worker.inputs.batch import Batch

log = structlog.get_logger()


class GraphFamily(Protocol):
    """The graphs of one kind."""

    def start_capture(self, key: GraphKey) -> StartedCapture:
        """Captures one graph between two steps and starts its test."""

    def replay(self, key: GraphKey, batch: Batch) -> tuple[Tensor, ...]:
        """Runs a captured graph over a batch whose header was written.

        Returns:
            Outputs at the graph's size, valid until the next replay.

        Raises:
            GraphFaultError: the graph would read the wrong memory; the step may run again.
        """

    def warm_up(self, key: GraphKey) -> None:
        """Runs the program once over dummy requests, without a graph."""

    def drop(self, key: GraphKey) -> None:
        """Removes a graph."""


class GraphSet:
    """Captures planned graphs one at a time and replays ordered ones.

    It gives up and reports a graph that turns out to be bad; the graph's steps then run without it.
    """

    def __init__(
        self,
        planned: Sequence[GraphKey] = (),
        families: Mapping[GraphKind, GraphFamily] | None = None,
        *,
        on_fault: Callable[[GraphOutcome], None] = lambda _: None,
        agree: Callable[[str], str] = str,
    ) -> None:
        """Starts without captured graphs.

        Args:
            planned: graphs to capture, in this order until a step misses one.
            families: captures and replays the planned graphs, by kind.
            on_fault: receives each captured graph that is given up while serving.
            agree: maps this rank's fault of a graph, or "", to the one that holds for all ranks.
        """
        self.planned = tuple(planned)
        self._planned = frozenset(planned)
        self._families = families or {}
        self._on_fault = on_fault
        self._agree = agree
        self._pending = list(planned)
        self._under_test: deque[StartedCapture] = deque()
        self._captured: set[GraphKey] = set()
        self._ascending = sorted(
            (key for key in planned if key.kind is not GraphKind.DRAFT),
            key=lambda key: (key.kind, key.num_tokens, key.graph_bs),
        )
        self._num_wanted: Counter[GraphKey] = Counter()
        self._told: GraphKey | None = None

    @property
    def num_pending(self) -> int:
        """Graphs to capture or under test."""
        return len(self._pending) + len(self._under_test)

    def require_planned(self, batch: Batch) -> None:
        """Raises ValueError if a batch does not fit its graph or the graph is not planned."""
        key = batch.graph_key
        if key is None:
            return
        if key not in self._planned:
            raise ValueError(
                "the step's descriptor is invalid: it has graph mode "
                f"{key.kind.runtime_mode} with {key}, which was never captured"
            )
        if not _has_room(key, batch):
            raise ValueError(
                f"the step's descriptor is invalid: it has {batch.num_tokens} tokens of "
                f"{len(batch.row_ids)} requests for {key}"
            )

    def is_captured(self, key: GraphKey) -> bool:
        """Whether the graph can be replayed."""
        return key in self._captured

    def note_missed(self, batch: Batch) -> None:
        """Makes the graph that a batch missed more urgent."""
        if not self.num_pending:
            return
        for key in self._ascending:
            if _has_room(key, batch):
                self._num_wanted[key] += 1
                return

    @property
    def next_pending(self) -> GraphKey | None:
        """The graph missed by most steps, at first the first one planned; None if none is left."""
        if self._told in self._pending:
            return self._told
        if not self._pending:
            return None
        return max(self._pending, key=self._num_wanted.__getitem__)

    def capture_first(self, key: GraphKey) -> None:
        """Makes a graph `next_pending` until it is captured."""
        self._told = key

    def capture_next(self) -> GraphOutcome:
        """Captures `next_pending`.

        If a graph is under test, ends its test instead.
        """
        return self._end_test() or self.capture(self._next())

    def capture_ahead(self, max_under_test: int = 1) -> GraphOutcome | None:
        """Captures the graph that `capture_next` would, without waiting for its test.

        Args:
            max_under_test: most graphs under test at once; each holds memory for its expected
                outputs.

        Returns:
            The outcome of the oldest test, if there are more of them or nothing is left to capture.
        """
        is_last = not self._pending
        if not is_last:
            self._under_test.append(self._start(self._next()))
        return self._end_test() if is_last or len(self._under_test) > max_under_test else None

    def capture(self, key: GraphKey) -> GraphOutcome:
        """Captures one of the pending graphs."""
        return self._finish(self._start(key))

    @torch.inference_mode()
    def warm_up(self, keys: Iterable[GraphKey]) -> None:
        """Runs the programs of graphs without graphs, to build their kernels."""
        for key in keys:
            self._families[key.kind].warm_up(key)

    def replay(self, key: GraphKey, batch: Batch) -> tuple[Tensor, ...] | None:
        """Runs a graph over a batch whose header was written.

        Returns:
            Outputs at the graph's size, valid until the next replay; None if the graph is not
            captured or was given up.
        """
        if key not in self._captured:
            self._num_wanted[key] += 1
            return None
        try:
            return self._families[key.kind].replay(key, batch)
        except GraphFaultError as error:
            self.give_up(key, error)
            return None

    def give_up(self, key: GraphKey, error: GraphFaultError) -> None:
        """Removes a graph for good and reports it."""
        self._captured.discard(key)
        self._families[key.kind].drop(key)
        log.error("graph_quarantined", num_tokens=key.num_tokens, fault=str(error))
        self._on_fault(GraphOutcome(key=key, fault=str(error)))

    def _end_test(self) -> GraphOutcome | None:
        """Waits for the verdict of the oldest test, if any."""
        return self._finish(self._under_test.popleft()) if self._under_test else None

    def _next(self) -> GraphKey:
        key = self.next_pending
        assert key is not None, "callers know that a graph is left"
        return key

    @torch.inference_mode()
    def _start(self, key: GraphKey) -> StartedCapture:
        self._pending.remove(key)
        return self._families[key.kind].start_capture(key)

    def _finish(self, started: StartedCapture) -> GraphOutcome:
        outcome = started.finish(self._agree)
        key = outcome.key
        if outcome.fault:
            log.warning("graph_given_up", graph=str(key), fault=outcome.fault)
            return outcome
        self._captured.add(key)
        log.info(
            "graph_captured",
            kind=key.kind.name,
            num_tokens=key.num_tokens,
            capture_ms=round(outcome.capture_s * 1000, 1),
            num_kb=outcome.num_bytes // 1024,
            num_pending=self.num_pending,
        )
        return outcome


def _has_room(key: GraphKey, batch: Batch) -> bool:
    num_requests = len(batch.row_ids)
    return (
        batch.num_rows <= key.num_tokens
        and num_requests <= key.graph_bs
        and batch.max_seqlen_q <= key.max_q_len
        and (key.kind is not GraphKind.DECODE or batch.num_tokens == num_requests * key.max_q_len)
    )
