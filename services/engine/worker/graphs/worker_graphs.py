"""The graphs of a worker: those to come, those that run, those that were given up."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import structlog
import torch
from torch import Tensor

from models.cudagraph_mode import GraphKind
from models.forward_context import GraphKey
from services.engine.compilation.graphs.graph_runner import GraphOutcome, StartedCapture
from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.worker.graphs.decode_graphs import DecodedStep, DecodeGraphs
from services.engine.worker.graphs.draft_graphs import DraftedStep, DraftGraphs
from services.engine.worker.graphs.prompt_graphs import ComputedPrompts, PromptGraphs
from services.engine.worker.graphs.step_pieces import StepPieces
from services.engine.worker.inputs.forward_pass import PassShape
from services.engine.worker.inputs.input_buffers import StepInputs
from services.engine.worker.inputs.step_arrays import Int32Array, StepArrays

log = structlog.get_logger()


class WorkerGraphs:
    """Captures planned graphs one at a time and replays what the scheduler orders.

    It takes no decision about a step. A graph that turns out to be bad is given up and reported,
    and its steps run without it.
    """

    def __init__(
        self,
        planned: Sequence[GraphKey],
        decodes: DecodeGraphs,
        *,
        prompts: PromptGraphs | None = None,
        pieces: StepPieces | None = None,
        drafts: DraftGraphs | None = None,
        on_fault: Callable[[GraphOutcome], None],
    ) -> None:
        """Starts without graphs.

        Args:
            planned: what to capture, in this order as long as no step asked for anything.
            decodes: captures and replays whole decode steps.
            prompts: captures and replays whole steps of other kinds.
            pieces: captures the pieces of other steps.
            drafts: captures and replays what follows a whole decode step with drafts.
            on_fault: hears of a graph that was captured and is given up while serving.
        """
        self.planned = tuple(planned)
        self._planned = frozenset(planned)
        self._decodes = decodes
        self._prompts = prompts
        self._pieces = pieces
        self._drafts = drafts
        self._on_fault = on_fault
        self._pending = list(planned)
        self._under_test: deque[StartedCapture] = deque()
        self._captured: set[GraphKey] = set()
        self._ascending = sorted(
            (key for key in planned if key.kind is not GraphKind.DRAFT),
            key=lambda key: (key.kind, key.num_tokens, key.graph_bs),
        )
        self._num_wanted: Counter[GraphKey] = Counter()

    @property
    def num_pending(self) -> int:
        """Graphs that are still to be captured or whose test is under way."""
        return len(self._pending) + len(self._under_test)

    def is_planned(self, key: GraphKey) -> bool:
        """Whether a step may be ordered to run this graph."""
        return key in self._planned

    def is_captured(self, key: GraphKey) -> bool:
        """Whether the graph can be replayed."""
        return key in self._captured

    def note_missed(self, *, num_tokens: int, num_requests: int, is_decode: bool) -> None:
        """Remembers a step that ran without a graph: what serves it becomes more urgent.

        Args:
            num_tokens: its query tokens.
            num_requests: its requests.
            is_decode: all of them have as many tokens as a decode step's.
        """
        for key in self._ascending:
            has_room = num_tokens <= key.num_tokens and num_requests <= key.graph_bs
            if has_room and (is_decode or key.kind is not GraphKind.DECODE):
                self._num_wanted[key] += 1
                return

    def capture_next(self) -> GraphOutcome:
        """Captures the graph that most steps have missed; at first, the first one planned.

        Where a graph is under test already, its test ends instead.
        """
        return self._end_test() or self.capture(self._next())

    def capture_ahead(self, max_under_test: int = 1) -> GraphOutcome | None:
        """Captures the graph that `capture_next` would, and leaves it to the device to test.

        Args:
            max_under_test: how many graphs the device may have to test, each with the outputs
                expected of it in memory.

        Returns:
            What became of the graph that has been under test longest, if there are more of them
            or nothing is left to capture.
        """
        is_last = not self._pending
        if not is_last:
            self._under_test.append(self._start(self._next()))
        return self._end_test() if is_last or len(self._under_test) > max_under_test else None

    def capture(self, key: GraphKey) -> GraphOutcome:
        """Captures one of the pending graphs."""
        return self._finish(self._start(key))

    @torch.inference_mode()
    def rehearse_decodes(self, keys: Iterable[GraphKey]) -> None:
        """Runs decode steps of dummy requests, so that later ones find their kernels built."""
        for key in keys:
            self._decodes.rehearse(key)

    def replay_decodes(self, key: GraphKey, arrays: StepArrays) -> DecodedStep | None:
        """Runs a whole decode step by its graph; None if that graph was given up."""
        if key not in self._captured:
            return None
        try:
            return self._decodes.replay(key, arrays)
        except GraphFaultError as error:
            self.give_up(key, error)
            return None

    def replay_prompts(self, key: GraphKey, arrays: StepArrays) -> ComputedPrompts | None:
        """Runs a whole step with prompts by its graph; None if that graph was given up."""
        if key not in self._captured or self._prompts is None:
            return None
        try:
            return self._prompts.replay(key, arrays)
        except GraphFaultError as error:
            self.give_up(key, error)
            return None

    def replay_pieces(self, key: GraphKey, inputs: StepInputs, shape: PassShape) -> Tensor | None:
        """Runs a step by the graphs of its pieces, [T, hidden]; None if those were given up."""
        if key not in self._captured or self._pieces is None:
            return None
        try:
            return self._pieces.replay(key, inputs, shape)
        except GraphFaultError as error:
            self.give_up(key, error)
            return None

    def replay_drafts(
        self, key: GraphKey, *, hidden: Tensor, sampled: Tensor, drafts: Int32Array
    ) -> DraftedStep | None:
        """Verifies and drafts behind the graph of a decode step; None if no graph can.

        The arguments are those of `DraftGraphs.replay`.
        """
        if key not in self._captured or self._drafts is None:
            if key in self._planned:
                self._num_wanted[key] += 1
            return None
        try:
            return self._drafts.replay(key, hidden=hidden, sampled=sampled, drafts=drafts)
        except GraphFaultError as error:
            self.give_up(key, error)
            return None

    def give_up(self, key: GraphKey, error: GraphFaultError) -> None:
        """Never runs a graph again and reports it."""
        self._captured.discard(key)
        self._kind(key).drop(key)
        log.error("graph_quarantined", num_tokens=key.num_tokens, fault=str(error))
        self._on_fault(GraphOutcome(key=key, fault=str(error)))

    def _kind(self, key: GraphKey) -> DecodeGraphs | PromptGraphs | StepPieces | DraftGraphs:
        """Returns what holds the graphs of a key's kind."""
        kind = {
            GraphKind.DECODE: self._decodes,
            GraphKind.MIXED: self._prompts,
            GraphKind.PIECEWISE: self._pieces,
            GraphKind.DRAFT: self._drafts,
        }[key.kind]
        assert kind is not None, "graphs are planned only where something captures them"
        return kind

    def _end_test(self) -> GraphOutcome | None:
        """Waits for the verdict on the graph that has been under test longest, if there is one."""
        return self._finish(self._under_test.popleft()) if self._under_test else None

    def _next(self) -> GraphKey:
        return max(self._pending, key=self._num_wanted.__getitem__)

    @torch.inference_mode()
    def _start(self, key: GraphKey) -> StartedCapture:
        self._pending.remove(key)
        return self._kind(key).start_capture(key)

    def _finish(self, started: StartedCapture) -> GraphOutcome:
        outcome = started.finish()
        key = outcome.key
        if outcome.fault:
            log.warning("graph_given_up", graph=str(key), fault=outcome.fault)
            return outcome
        self._captured.add(key)
        log.info(
            "graph_captured",
            num_tokens=key.num_tokens,
            kind=key.kind.name,
            capture_ms=round(outcome.capture_s * 1000, 1),
            num_kb=outcome.num_bytes // 1024,
            num_pending=self.num_pending,
        )
        return outcome
