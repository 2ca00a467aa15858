"""The worker's graphs: planned, captured and given up."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import structlog
import torch
from torch import Tensor

from models.cudagraph_mode import GraphKind
from models.forward_context import GraphKey
from services.engine.compilation.graphs.graph_runner import GraphCapture, GraphOutcome
from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.worker.graphs.graph_family import GraphFamily
from services.engine.worker.inputs.batch import Batch

log = structlog.get_logger()

MOST_SHARING = 24
"""Most graphs of steps that share prefixes: memory is set aside for as many."""

_OF_DECODES = (GraphKind.DECODE, GraphKind.DRAFT)


class GraphSet:
    """Captures planned graphs one at a time and replays ordered ones.

    It gives up and reports a graph that turns out to be bad; the graph's steps then run without it.
    """

    def __init__(
        self,
        planned: Sequence[GraphKey] = (),
        families: Mapping[GraphKind, GraphFamily] | None = None,
        *,
        on_demand: Sequence[GraphKey] = (),
        on_fault: Callable[[GraphOutcome], None] = lambda _: None,
        agree: Callable[[str], str] = str,
    ) -> None:
        """Starts without captured graphs.

        Args:
            planned: graphs to capture, in this order until a step misses one.
            families: captures and replays the planned graphs, by kind.
            on_demand: graphs of steps that share prefixes or have no adapters, captured once such a
                step misses them; up to MOST_SHARING that share prefixes. Until then steps run
                planned graphs, which share nothing and add adapters.
            on_fault: receives each captured graph that is given up while serving.
            agree: maps this rank's fault of a graph, or "", to the one that holds for all ranks.
        """
        self.planned = tuple(planned)
        self.on_demand = tuple(on_demand)
        self._known = frozenset((*planned, *on_demand))
        self._families = families or {}
        self._on_fault = on_fault
        self._agree = agree
        self._pending = list(planned)
        self._not_wanted = dict.fromkeys(on_demand)
        self._num_left = MOST_SHARING
        self._begun: GraphCapture | None = None
        self._under_test: deque[GraphCapture] = deque()
        self._captured: set[GraphKey] = set()
        self._is_early = False
        self._provisional: dict[GraphKey, int] | None = None
        self._ascending = sorted(
            (key for key in planned if key.kind.is_ordered),
            key=lambda key: (key.kind, key.num_tokens, key.graph_bs),
        )
        self._num_wanted: Counter[GraphKey] = Counter()
        self._told: GraphKey | None = None

    @property
    def num_pending(self) -> int:
        """Graphs to capture, begun or under test."""
        return len(self._pending) + len(self._under_test) + (self._begun is not None)

    def require_planned(self, batch: Batch) -> None:
        """Raises ValueError if a batch does not fit its graph or the graph is not planned."""
        key = batch.graph_key
        if key is None:
            return
        if key not in self._known:
            raise ValueError(
                "the step's descriptor is invalid: it has graph mode "
                f"{key.kind.runtime_mode} with {key}, which was never captured"
            )
        if not batch.fits(key):
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
            if batch.fits(key):
                self._num_wanted[key] += 1
                return

    @property
    def is_early(self) -> bool:
        """Whether the model is still compiled."""
        return self._is_early

    @property
    def has_next(self) -> bool:
        """Whether `capture_slice` has something to do."""
        return bool(self._begun or self._under_test) or self.next_pending is not None

    def begin_early(self, *, are_provisional: bool) -> None:
        """Restricts captures to decodes that steps have missed, while the model is compiled.

        are_provisional: graphs of the compiled model will replace them.
        """
        self._is_early = True
        if are_provisional:
            self._provisional = {}

    def end_early(self) -> None:
        """Plans all graphs, of the model that is installed next.

        A provisional graph serves until the graph that replaces it has passed its test.
        """
        self._is_early = False
        self._told = None
        if self._provisional is None:
            return
        self.begin_again()
        again = {*self._pending, *self._provisional}
        self._pending = [key for key in (*self.planned, *self.on_demand) if key in again]
        if self._provisional:
            log.info(
                "provisional_graphs_end",
                num_graphs=len(self._provisional),
                total_mb=sum(self._provisional.values()) // 2**20,
            )
        self._provisional = None

    def begin_again(self) -> None:
        """Begins unfinished captures again: their tests expect results of the model of before."""
        unfinished = [each.key for each in (*self._under_test, self._begun) if each is not None]
        for key in set(unfinished) - self._captured:
            self._families[key.kind].drop(key)
        self._pending = [*unfinished, *self._pending]
        self._begun = None
        self._under_test.clear()

    @property
    def next_pending(self) -> GraphKey | None:
        """The graph to go on with, or the one that most steps wanted; None if none is left.

        At first that is the first one planned.
        """
        if self._begun is not None:
            return self._begun.key
        if self._told in self._pending:
            return self._told
        pending = self._pending
        if self._is_early:
            pending = [key for key in pending if key.kind in _OF_DECODES and self._num_wanted[key]]
        return max(pending, key=self._num_wanted.__getitem__, default=None)

    @property
    def is_next_missed(self) -> bool:
        """Whether a step would have replayed the graph to go on with."""
        key = self.next_pending
        return key is not None and self._num_wanted[key] > 0

    def capture_first(self, key: GraphKey) -> None:
        """Makes a graph `next_pending` until it is captured."""
        self._told = key
        self.want(key, is_ordered=True)

    def want(self, key: GraphKey, *, is_ordered: bool = False) -> None:
        """Plans a graph that is captured on demand, if there is room or other ranks have some."""
        has_room = is_ordered or not key.shares_prefixes or self._num_left > 0
        if has_room and key in self._not_wanted:
            self._num_left -= key.shares_prefixes
            del self._not_wanted[key]
            self._pending.append(key)

    def must_wait(self, *, max_under_test: int = 0) -> bool:
        """Whether `capture_slice` would wait for the device."""
        return self._ends_test(max_under_test) and not self._under_test[0].is_decided

    def capture_slice(self, *, max_under_test: int = 0, begins: bool = True) -> GraphOutcome | None:
        """Runs the next slice of a capture, of `next_pending`, or ends the oldest test.

        Args:
            max_under_test: most graphs under test while others are captured; each holds memory for
                its expected outputs.
            begins: whether another capture may begin. Several ranks may want different graphs, and
                none begins one that the others do not.

        Returns:
            The outcome of the test that it ended, if any but a provisional graph's that failed.
        """
        if self._ends_test(max_under_test if begins else 0):
            outcome = self._finish(self._under_test.popleft())
            return None if outcome.is_provisional and outcome.fault else outcome
        if self._begun is None:
            key = self.next_pending
            if key is None or not begins:
                return None
            self._begun = self._begin(key)
        self._advance(self._begun)
        if self._begun.is_under_test:
            self._under_test.append(self._begun)
            self._begun = None
        return None

    def capture(self, key: GraphKey) -> GraphOutcome:
        """Captures one of the pending graphs."""
        begun = self._begin(key)
        while not begun.is_under_test:
            self._advance(begun)
        return self._finish(begun)

    @torch.inference_mode()
    def warm_up(self, keys: Iterable[GraphKey]) -> None:
        """Runs the programs of graphs without graphs, to build their kernels."""
        for key in keys:
            self._families[key.kind].warm_up(key)

    def replay(self, key: GraphKey, batch: Batch | None) -> tuple[Tensor, ...] | None:
        """Runs a graph over a batch whose header was written, or without one the encoder.

        Returns:
            Outputs at the graph's size, valid until the next replay; None if the graph is not
            captured or was given up.
        """
        if key not in self._captured:
            self._num_wanted[key] += 1
            return None
        if self._provisional is not None:
            self._num_wanted[key] += 1  # the graph that replaces it comes first
        if batch is not None:
            self._want_form(key, batch)
        try:
            return self._families[key.kind].replay(key, batch)
        except GraphFaultError as error:
            self.give_up(key, error)
            return None

    @property
    def most_on_demand(self) -> int:
        """Most graphs that are captured on demand."""
        num_sharing = sum(key.shares_prefixes for key in self.on_demand)
        return len(self.on_demand) - max(0, num_sharing - MOST_SHARING)

    def _want_form(self, key: GraphKey, batch: Batch) -> None:
        """Plans the form of a step's graph that does no more than the step needs."""
        shares, skips = batch.prefixes is not None, not batch.has_adapters
        for form in ((shares, skips), (False, skips), (shares, False)):
            wanted = replace(key, shares_prefixes=form[0], skips_adapters=form[1])
            if wanted == key:
                return
            if wanted in self._known:
                self.want(wanted)
                self._num_wanted[wanted] += 1
                return

    def give_up(self, key: GraphKey, error: GraphFaultError) -> None:
        """Removes a graph for good and reports it."""
        self._captured.discard(key)
        self._pending = [each for each in self._pending if each != key]
        if self._provisional is not None:
            self._provisional.pop(key, None)
        self._families[key.kind].drop(key)
        log.error("graph_quarantined", num_tokens=key.num_tokens, fault=str(error))
        self._on_fault(GraphOutcome(key=key, fault=str(error)))

    def _ends_test(self, max_under_test: int) -> bool:
        """Whether the next thing to do is to end a test."""
        num_under_test = len(self._under_test)
        is_last = self.next_pending is None and num_under_test > 0
        return self._begun is None and (is_last or num_under_test > max_under_test)

    def _begin(self, key: GraphKey) -> GraphCapture:
        self._pending.remove(key)
        return self._families[key.kind].capture(key)

    @torch.inference_mode()
    def _advance(self, begun: GraphCapture) -> None:
        begun.advance()

    def _finish(self, begun: GraphCapture) -> GraphOutcome:
        outcome = begun.finish(self._agree)
        key = outcome.key
        if self._provisional is not None:
            self._provisional[key] = outcome.num_bytes
            outcome = replace(outcome, is_provisional=True)
        if outcome.fault:
            self._captured.discard(key)
            log.warning("graph_given_up", graph=str(key), fault=outcome.fault)
            return outcome
        self._captured.add(key)
        log.info(
            "graph_captured",
            kind=key.kind.name,
            num_tokens=key.num_tokens,
            shares_prefixes=key.shares_prefixes,
            is_provisional=outcome.is_provisional,
            capture_ms=round(outcome.capture_s * 1000, 1),
            num_kb=outcome.num_bytes // 1024,
            num_pending=self.num_pending,
        )
        return outcome
