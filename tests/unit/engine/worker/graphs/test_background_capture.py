"""Graphs that are captured while a worker serves."""

import socket
import threading
from collections import deque

import pytest

from models.cudagraph_mode import GraphKind
from models.forward_context import GraphKey
from protos.engine.v1.worker_pb2 import (
    GraphOrder,
    GraphState,
    WorkerCommand,
    WorkerEvent,
    WorkerReady,
)
from services.engine.batch import BatchDescriptor, step_result
from services.engine.compilation.graphs.capture_plan import wire_key
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.compilation.passes.unmatched import UnmatchedPassError
from services.engine.worker.graphs.background_capture import (
    LEISURE_SHARE,
    SERVING_SHARE,
    BackgroundCapture,
)
from services.engine.worker.graphs.background_compile import BackgroundCompile
from services.engine.worker.process import StepServer
from services.engine.worker.wire import Channel

WAIT_S = 60
SLICE_S = 2.0


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Graphs:
    """Stands in for GraphSet; each capture has two slices, of SLICE_S each."""

    def __init__(self, sizes, clock):
        self._sizes = deque(sizes)
        self._begun = None
        self._under_test = deque()
        self._clock = clock
        self.is_early = False
        self.is_next_missed = True
        self.is_decided = True

    @property
    def num_pending(self):
        return len(self._sizes) + (self._begun is not None) + len(self._under_test)

    @property
    def has_next(self):
        return self.num_pending > 0

    @property
    def next_pending(self):
        size = self._begun or next(iter(self._sizes), None)
        return size and decode_key(size)

    def capture_first(self, key):
        assert key == self.next_pending

    def end_early(self):
        self.is_early = False

    def must_wait(self, *, max_under_test):
        return self._ends_test(max_under_test) and not self.is_decided

    def capture_slice(self, *, max_under_test=0, begins=True):
        if self._ends_test(max_under_test):
            return self._under_test.popleft()
        if self._begun is None and not begins:
            return None
        self._clock.now_s += SLICE_S
        if self._begun is None:
            self._begun = self._sizes.popleft()
            return None
        size, self._begun = self._begun, None
        fault = "planted" if size == 3 else ""
        outcome = GraphOutcome(key=decode_key(size), capture_s=2 * SLICE_S, fault=fault)
        self._under_test.append(outcome)
        return None

    def _ends_test(self, max_under_test):
        is_last = not self._sizes and bool(self._under_test)
        return self._begun is None and (is_last or len(self._under_test) > max_under_test)


class OneTurn:
    """Stands in for Turns."""

    compilation_waits = True
    is_wanted = False
    is_held_up = False

    def hold_up(self):
        self.is_held_up = self.compilation_waits
        return self.compilation_waits

    def let_go(self):
        self.is_held_up = False


class Compilation:
    """Stands in for BackgroundCompile."""

    is_done = False
    is_installed = False

    def __init__(self):
        self.turns = OneTurn()

    def install(self):
        assert not self.turns.is_held_up
        self.is_installed = True


def decode_key(size):
    return GraphKey(kind=GraphKind.DECODE, num_tokens=size, graph_bs=size, max_q_len=1)


def go_on(capture, *, is_idle):
    """Does what is due, as a single rank does."""
    return capture.obey(capture.due(is_idle=is_idle))


def test_an_idle_worker_captures_one_while_the_device_tests_the_last():
    clock = Clock()
    capture = BackgroundCapture(Graphs([2, 1], clock), clock=clock)
    sizes = []
    while capture.is_due(is_idle=True):
        outcome = go_on(capture, is_idle=True)
        sizes.append(outcome and outcome.key.graph_bs)
    assert sizes == [None] * 4 + [2, 1]
    assert not capture.has_work


def test_a_graph_under_test_is_done_with_before_another_is_captured_under_load():
    clock = Clock()
    capture = BackgroundCapture(Graphs([2, 1], clock), clock=clock)
    assert [go_on(capture, is_idle=True) for _ in range(2)] == [None, None]
    started_s = clock.now_s
    assert go_on(capture, is_idle=False).key.graph_bs == 2
    assert clock.now_s == started_s
    assert [go_on(capture, is_idle=False) for _ in range(2)] == [None, None]
    assert go_on(capture, is_idle=False).key.graph_bs == 1
    assert not capture.has_work


def test_no_step_waits_for_a_test():
    clock = Clock()
    graphs = Graphs([1], clock)
    capture = BackgroundCapture(graphs, clock=clock)
    for _ in range(2):
        go_on(capture, is_idle=True)
    graphs.is_decided = False
    assert not capture.is_due(is_idle=True)
    assert capture.max_wait_s > 0
    graphs.is_decided = True
    assert capture.max_wait_s == 0
    assert go_on(capture, is_idle=True).key.graph_bs == 1
    assert capture.max_wait_s is None


def test_graphs_are_captured_early_while_the_compilation_waits():
    clock = Clock()
    graphs, compilation = Graphs([2, 1], clock), Compilation()
    graphs.is_early = True
    capture = BackgroundCapture(graphs, compilation=compilation, clock=clock)
    compilation.turns.compilation_waits = False
    assert not capture.is_due(is_idle=False)
    compilation.turns.compilation_waits = True
    # Eager steps cost more than a slice, so none has to be waited for.
    outcomes = []
    while graphs.num_pending > 1:
        assert capture.is_due(is_idle=False)
        outcomes.append(go_on(capture, is_idle=False))
    assert [each.key.graph_bs for each in outcomes if each] == [2]
    assert compilation.turns.is_wanted
    compilation.is_done = True
    assert capture.is_due(is_idle=False)
    assert go_on(capture, is_idle=False) is None
    assert compilation.is_installed
    assert not graphs.is_early


def test_a_compilation_gives_way_while_steps_miss_graphs():
    graphs, compilation = Graphs([1], Clock()), Compilation()
    graphs.is_early = True
    capture = BackgroundCapture(graphs, compilation=compilation)
    compilation.turns.compilation_waits = False
    assert not capture.is_due(is_idle=False)
    assert compilation.turns.is_wanted
    compilation.turns.compilation_waits = True
    while graphs.has_next:
        go_on(capture, is_idle=False)
    assert not capture.is_due(is_idle=False)
    assert not compilation.turns.is_wanted


def test_captures_wait_for_the_compilation_where_none_is_early():
    clock = Clock()
    capture = BackgroundCapture(Graphs([1], clock), compilation=Compilation(), clock=clock)
    assert not capture.is_due(is_idle=True)


@pytest.mark.parametrize(("error", "is_fatal"), [(UnmatchedPassError, True), (ValueError, False)])
def test_a_broken_promise_of_the_model_is_fatal_and_other_failures_are_not(error, is_fatal):
    def compile_model(turns):
        raise error("planted")

    installed = []
    compilation = BackgroundCompile(compile_model, lambda: installed.append(1))
    capture = BackgroundCapture(Graphs([], Clock()), compilation=compilation)
    while not capture.is_due(is_idle=True):
        pass
    if is_fatal:
        with pytest.raises(UnmatchedPassError, match="planted"):
            go_on(capture, is_idle=True)
    else:
        go_on(capture, is_idle=True)
        assert not capture.has_work
    assert installed == []


def test_no_rank_runs_the_compiled_model_where_one_could_not_compile_it():
    installed = []
    compilation = BackgroundCompile(
        lambda turns: None, lambda: installed.append(1), agree=lambda fault: fault or "rank 1: no"
    )
    capture = BackgroundCapture(Graphs([], Clock()), compilation=compilation)
    while not capture.is_due(is_idle=True):
        pass
    go_on(capture, is_idle=True)
    assert installed == []
    assert not capture.has_work


class Rank:
    """One of several ranks whose model is compiled while they serve."""

    def __init__(self):
        clock = Clock()
        self.graphs, self.compilation = Graphs([2, 1], clock), Compilation()
        self.graphs.is_early = True
        self.capture = BackgroundCapture(self.graphs, compilation=self.compilation, clock=clock)


def test_a_compilation_is_held_up_until_all_ranks_capture():
    rank = Rank()
    due = rank.capture.due(is_idle=False)
    assert (due.key.num_tokens, due.is_compiled) == (2, False)
    assert rank.compilation.turns.is_held_up
    assert rank.capture.obey(due) is None
    assert not rank.compilation.turns.is_held_up
    assert rank.graphs.next_pending == decode_key(2)


def test_nothing_is_due_where_a_compilation_goes_on_just_now():
    rank = Rank()
    assert rank.capture.is_due(is_idle=False)
    rank.compilation.turns.compilation_waits = False
    assert rank.capture.due(is_idle=False) is None


def test_a_rank_that_has_compiled_captures_with_the_others_until_all_have():
    rank = Rank()
    rank.compilation.is_done = True
    assert rank.capture.due(is_idle=False).is_compiled
    captured = []
    for _ in range(3):
        order = GraphOrder(key=wire_key(rank.graphs.next_pending), is_compiled=False)
        captured.append(rank.capture.obey(order))
    assert [each and each.key for each in captured] == [None, None, decode_key(2)]
    assert not rank.compilation.is_installed
    rank.capture.obey(GraphOrder(is_compiled=True))
    assert rank.compilation.is_installed
    assert not rank.graphs.is_early


@pytest.mark.parametrize(("is_missed", "share"), [(True, SERVING_SHARE), (False, LEISURE_SHARE)])
def test_under_load_serving_gets_most_of_the_time(is_missed, share):
    clock = Clock()
    graphs = Graphs([2, 1], clock)
    graphs.is_next_missed = is_missed
    capture = BackgroundCapture(graphs, clock=clock)
    assert capture.is_due(is_idle=False)
    go_on(capture, is_idle=False)
    clock.now_s += share * SLICE_S - 0.1
    assert not capture.is_due(is_idle=False)
    assert capture.is_due(is_idle=True)
    clock.now_s += 0.1
    assert capture.is_due(is_idle=False)


class Device:
    """A runner whose steps are done at once."""

    adapters = None

    def execute(self, descriptor):
        return DoneStep(descriptor.step_id)


class DoneStep:
    is_ready = True

    def __init__(self, step_id):
        self._step_id = step_id

    def message(self):
        return step_result(self._step_id, [7])


@pytest.fixture
def service_end():
    ours, theirs = socket.socketpair()
    service, worker = Channel(ours), Channel(theirs)
    clock = Clock()
    capture = BackgroundCapture(Graphs([4, 3, 2], clock), clock=clock)

    def serve():
        with pytest.raises(EOFError):
            StepServer(worker).serve(Device(), WorkerReady(num_blocks=7), capture)

    thread = threading.Thread(target=serve)
    thread.start()
    yield service
    service.close()
    thread.join(WAIT_S)
    worker.close()
    assert not thread.is_alive()


def receive(channel):
    content = channel.receive(WAIT_S)
    assert content is not None
    return WorkerEvent.FromString(content)


def test_a_worker_is_ready_before_its_graphs_and_reports_each_of_them(service_end):
    assert receive(service_end).ready.num_blocks == 7
    reports = [receive(service_end).graph for _ in range(3)]
    assert [report.key.graph_bs for report in reports] == [4, 3, 2]
    assert [report.state for report in reports] == [
        GraphState.GRAPH_STATE_CAPTURED,
        GraphState.GRAPH_STATE_QUARANTINED,
        GraphState.GRAPH_STATE_CAPTURED,
    ]
    assert reports[1].fault == "planted"
    step = BatchDescriptor(step_id=1).SerializeToString()
    service_end.send(WorkerCommand(step=step).SerializeToString())
    assert receive(service_end).result.step_id == 1
