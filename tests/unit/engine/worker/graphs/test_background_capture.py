"""Graphs that are captured while a worker serves."""

import socket
import threading
from collections import deque

import pytest

from models.cudagraph_mode import GraphKind
from models.forward_context import GraphKey
from protos.engine.v1.worker_pb2 import GraphState, WorkerCommand, WorkerEvent, WorkerReady
from services.engine.batch import BatchDescriptor, step_result
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.compilation.passes.unmatched import UnmatchedPassError
from services.engine.worker.graphs.background_capture import SERVING_SHARE, BackgroundCapture
from services.engine.worker.graphs.background_compile import BackgroundCompile
from services.engine.worker.process import StepServer
from services.engine.worker.wire import Channel

WAIT_S = 60
CAPTURE_S = 2.0


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Graphs:
    """Stands in for GraphSet; each capture takes CAPTURE_S."""

    def __init__(self, sizes, clock):
        self._sizes = deque(sizes)
        self._under_test = None
        self._clock = clock

    @property
    def num_pending(self):
        return len(self._sizes) + (self._under_test is not None)

    def capture_next(self):
        before, self._under_test = self._under_test, None
        return before or self._capture()

    def capture_ahead(self):
        started = self._capture() if self._sizes else None
        before, self._under_test = self._under_test, started
        return before

    def _capture(self):
        self._clock.now_s += CAPTURE_S
        size = self._sizes.popleft()
        key = GraphKey(kind=GraphKind.DECODE, num_tokens=size, graph_bs=size, max_q_len=1)
        return GraphOutcome(key=key, capture_s=CAPTURE_S, fault="planted" if size == 3 else "")


def test_an_idle_worker_captures_one_after_the_other():
    clock = Clock()
    capture = BackgroundCapture(Graphs([2, 1], clock), clock=clock)
    sizes = []
    while capture.is_due(is_idle=True):
        outcome = capture.run(is_idle=True)
        sizes.append(outcome and outcome.key.graph_bs)
    assert sizes == [None, 2, 1]
    assert not capture.has_work


def test_a_graph_under_test_is_done_with_before_another_is_captured_under_load():
    clock = Clock()
    capture = BackgroundCapture(Graphs([2, 1], clock), clock=clock)
    assert capture.run(is_idle=True) is None
    started_s = clock.now_s
    assert capture.run(is_idle=False).key.graph_bs == 2
    assert clock.now_s == started_s
    assert capture.run(is_idle=False).key.graph_bs == 1
    assert not capture.has_work


@pytest.mark.parametrize(("error", "is_fatal"), [(UnmatchedPassError, True), (ValueError, False)])
def test_a_broken_promise_of_the_model_is_fatal_and_other_failures_are_not(error, is_fatal):
    def compile_model():
        raise error("planted")

    installed = []
    compilation = BackgroundCompile(compile_model, lambda: installed.append(1))
    capture = BackgroundCapture(Graphs([], Clock()), compilation=compilation)
    while not capture.is_due(is_idle=True):
        pass
    if is_fatal:
        with pytest.raises(UnmatchedPassError, match="planted"):
            capture.run(is_idle=True)
    else:
        capture.run(is_idle=True)
        assert not capture.has_work
    assert installed == []


def test_under_load_serving_gets_most_of_the_time():
    clock = Clock()
    capture = BackgroundCapture(Graphs([2, 1], clock), clock=clock)
    assert capture.is_due(is_idle=False)
    capture.run(is_idle=False)
    clock.now_s += SERVING_SHARE * CAPTURE_S - 0.1
    assert not capture.is_due(is_idle=False)
    assert capture.is_due(is_idle=True)
    clock.now_s += 0.1
    assert capture.is_due(is_idle=False)


class Device:
    """A runner whose steps are done at once."""

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
