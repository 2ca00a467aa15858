import contextlib
import queue
import socket
import threading
from dataclasses import dataclass, field

import pytest
import torch

from protos.engine.v1.worker_pb2 import (
    GraphOrder,
    OrderAnswer,
    SleepOrder,
    WorkerCommand,
    WorkerEvent,
    WorkerReady,
)
from services.engine.batch import BatchDescriptor, StepFailure, step_result
from services.engine.compilation.graphs.capture_plan import piecewise_key
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.worker.process import RankFaultError, StepServer
from services.engine.worker.wire import Channel

WAIT_S = 60


@dataclass
class SlowStep:
    """A step whose result is ready when the test says so; waiting for it is an error."""

    step_id: int
    is_ready: bool = False
    elapsed_us: int = 0

    def message(self):
        assert self.is_ready, "a result was waited for"
        return step_result(self.step_id, [self.step_id], elapsed_us=self.elapsed_us)


@dataclass
class SlowDevice:
    """A runner whose steps the test finishes."""

    launched: queue.Queue = field(default_factory=queue.Queue)
    adapters: None = None

    def execute(self, descriptor):
        step = SlowStep(descriptor.step_id)
        self.launched.put(step)
        return step


@pytest.fixture
def service_end():
    """The service's channel to a StepServer on a slow device, the device, and the server."""
    ours, theirs = socket.socketpair()
    service, worker = Channel(ours), Channel(theirs)
    device, server = SlowDevice(), StepServer(worker)

    def serve():
        with pytest.raises(EOFError):
            server.serve(device, WorkerReady(num_blocks=7))

    thread = threading.Thread(target=serve)
    thread.start()
    assert receive(service).ready.num_blocks == 7
    yield service, device, server
    service.close()
    thread.join(WAIT_S)
    worker.close()
    assert not thread.is_alive()


def receive(channel):
    content = channel.receive(WAIT_S)
    assert content is not None
    return WorkerEvent.FromString(content)


def order(channel, step_id):
    order_step(channel, BatchDescriptor(step_id=step_id))


def order_step(channel, descriptor):
    command = WorkerCommand(step=descriptor.SerializeToString())
    channel.send(command.SerializeToString())


def test_a_step_is_launched_while_the_one_before_it_still_runs(service_end):
    service, device, server = service_end
    order(service, 1)
    order(service, 2)
    first, second = (device.launched.get(timeout=WAIT_S) for _ in range(2))
    assert (first.step_id, second.step_id, server.step_id) == (1, 2, 2)
    assert not first.is_ready


def test_a_result_is_sent_when_it_is_ready_though_no_descriptor_comes(service_end):
    service, device, _ = service_end
    order(service, 1)
    device.launched.get(timeout=WAIT_S).is_ready = True
    assert receive(service).result.step_id == 1


def test_results_come_in_the_order_of_the_steps(service_end):
    service, device, _ = service_end
    order(service, 1)
    order(service, 2)
    first, second = (device.launched.get(timeout=WAIT_S) for _ in range(2))
    second.is_ready = True
    assert service.receive(0.01) is None
    first.is_ready = True
    assert [receive(service).result.step_id for _ in range(2)] == [1, 2]


def test_the_time_of_a_step_begins_no_earlier_than_the_last_result(service_end):
    service, device, _ = service_end
    order(service, 1)
    order(service, 2)
    steps = [device.launched.get(timeout=WAIT_S) for _ in range(2)]
    for step in steps:
        step.elapsed_us = 2**32 - 1  # more than an hour
        step.is_ready = True
    assert [receive(service).result.elapsed_us == 2**32 - 1 for _ in steps][1] is False


class TestOutOfMemory:
    @pytest.fixture(
        params=[
            torch.OutOfMemoryError("CUDA out of memory."),
            MemoryError(),
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough"),
        ],
        ids=["cuda", "python", "torch on a cpu"],
    )
    def full_device(self, request, service_end, monkeypatch):
        """A device without memory for step 1."""
        _, device, _ = service_end
        execute = device.execute

        def execute_unless_first(descriptor):
            if descriptor.step_id == 1:
                raise request.param
            return execute(descriptor)

        monkeypatch.setattr(device, "execute", execute_unless_first)
        return device

    def test_is_reported_and_later_steps_are_skipped(self, service_end, full_device):
        service, _, _ = service_end
        order(service, 1)
        order(service, 2)
        results = [receive(service).result for _ in range(2)]
        assert [(result.step_id, result.failure) for result in results] == [
            (1, StepFailure.STEP_FAILURE_OUT_OF_MEMORY),
            (2, StepFailure.STEP_FAILURE_SKIPPED),
        ]
        knowing = BatchDescriptor(step_id=3, num_failed_steps=1)
        order_step(service, knowing)
        full_device.launched.get(timeout=WAIT_S).is_ready = True
        assert receive(service).result.step_id == 3


def test_a_graph_that_one_rank_alone_gives_up_ends_the_worker():
    worker, service = map(Channel, socket.socketpair())
    server = StepServer(worker, sends_results=False, num_ranks=2)
    outcome = GraphOutcome(key=piecewise_key(4), fault="it has moved")
    with pytest.raises(RankFaultError, match="it has moved"):
        server.report_fault(outcome)
    assert receive(service).graph.fault == "it has moved"
    service.close()
    worker.close()


class CompilingCapture:
    """A compilation that has ended and is not installed yet."""

    is_compiling = has_work = True

    @property
    def max_wait_s(self):
        return 0.0 if self.is_compiling else None

    def is_due(self, *, is_idle):
        return self.is_compiling

    def due(self, *, is_idle):
        return GraphOrder(is_compiled=True)

    def obey(self, order):
        self.is_compiling = self.has_work = False


class NotedSleeper:
    """Answers an order, and says whether the compilation had ended."""

    def __init__(self, capture):
        self.capture = capture

    def sleep(self, order, *, receive, obey, answer):
        assert not self.capture.is_compiling
        answer(OrderAnswer(order_id=order.order_id))


def test_sleep_follows_the_end_of_a_compilation_without_another_command():
    worker, service = map(Channel, socket.socketpair())
    capture = CompilingCapture()
    arguments = (SlowDevice(), WorkerReady(), capture, NotedSleeper(capture))

    def serve():
        with contextlib.suppress(EOFError):
            StepServer(worker).serve(*arguments)

    order = WorkerCommand(sleep=SleepOrder(level=1), order_id=7)
    service.send(order.SerializeToString())
    thread = threading.Thread(target=serve)
    thread.start()
    assert receive(service).HasField("ready")
    assert receive(service).order_answer.order_id == 7
    service.close()
    thread.join(WAIT_S)
    worker.close()
