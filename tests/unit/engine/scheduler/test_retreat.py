"""Steps for which memory does not suffice; test_scheduler_machine.py has them in any order."""

import pytest

from services.engine.batch import StepFailure
from services.engine.errors import MemoryExhaustedError, RequestFaultError
from services.engine.limits import StepLimits
from services.engine.request import FinishReason, RequestStatus
from services.engine.scheduler.recovery import lose_worker
from services.engine.scheduler.scheduler import Scheduler
from tests.support.fake_worker import VOCAB_SIZE, FakeWorker, expected_output
from tests.support.requests import make_request

LIMITS = StepLimits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
    block_size=4,
    vocab_size=VOCAB_SIZE,
)
NUM_BLOCKS = 33


class Rig:
    """A scheduler with a fake worker, two steps in flight."""

    def __init__(self):
        self.scheduler = Scheduler(LIMITS, num_blocks=NUM_BLOCKS)
        self.worker = FakeWorker(
            max_num_seqs=LIMITS.max_num_seqs,
            max_model_len=LIMITS.max_model_len,
            num_blocks=NUM_BLOCKS,
            block_size=LIMITS.block_size,
        )
        self.in_flight = []

    def send(self):
        self.in_flight.append(self.scheduler.schedule())
        return self.in_flight[-1]

    def receive(self):
        step = self.in_flight.pop(0)
        result = self.worker.execute(step.descriptor)
        if result.failure == StepFailure.STEP_FAILURE_SKIPPED:
            return []
        if result.failure:
            return self.scheduler.retreat([step, *self.in_flight])
        outputs = self.scheduler.update(step, result)
        for output in outputs:
            output.request.sink.put(output)
        return outputs

    def run(self):
        """Runs everything to its end; the fake worker checks what every step reads."""
        while self.scheduler.has_work or self.in_flight:
            while len(self.in_flight) < 2 and (step := self.scheduler.schedule()) is not None:
                self.in_flight.append(step)
            yield from self.receive()


@pytest.fixture
def rig():
    return Rig()


def test_all_requests_start_over_and_get_the_same_tokens_in_smaller_steps(rig):
    requests = [make_request(9), make_request(6)]
    for request in requests:
        rig.scheduler.add(request)
    rig.worker.memory_tokens = 10
    rig.send()
    rig.send()
    assert rig.receive() == []
    assert [request.status for request in requests] == [RequestStatus.WAITING] * 2
    assert rig.scheduler.num_batched_tokens_limit == 7
    assert rig.scheduler.num_free_blocks == NUM_BLOCKS - 1
    assert rig.receive() == []  # the next step, which the worker skipped
    ends = [output for output in rig.run() if output.is_last]
    assert [end.finish_reason for end in ends] == [FinishReason.LENGTH] * 2
    for request in requests:
        assert request.sink.token_ids == expected_output(request.prompt_token_ids, request.sampling)


def test_what_was_computed_before_is_found_again_and_what_was_not_is_not(rig):
    request = make_request(24)
    rig.scheduler.add(request)
    rig.send()
    rig.receive()  # 16 of its tokens
    rig.worker.memory_tokens = 4
    rig.send()
    rig.receive()
    step = rig.send()
    assert list(step.starts()) == [(request, 16)]


def test_a_single_token_that_fails_ends_its_request_and_no_other(rig):
    requests = [make_request(1), make_request(1)]
    for request in requests:
        rig.scheduler.add(request)
    rig.worker.memory_tokens = 0
    ended = []
    while not ended:
        rig.send()
        ended = rig.receive()
    assert [output.request for output in ended] == requests[:1]
    assert isinstance(ended[0].error, MemoryExhaustedError)
    rig.worker.memory_tokens = 100
    assert [output.request for output in rig.run() if output.is_last] == requests[1:]


def test_a_request_that_ended_meanwhile_leaves_nothing_findable_that_was_not_computed(rig):
    gone = make_request(12)
    rig.scheduler.add(gone)
    rig.worker.memory_tokens = 4
    rig.send()
    rig.scheduler.abort(gone)
    rig.receive()
    rig.worker.memory_tokens = 100
    twin = make_request(gone.prompt_token_ids)
    rig.scheduler.add(twin)
    assert list(rig.send().starts()) == [(twin, 0)]


def test_a_token_that_is_none_ends_its_request_alone(rig):
    requests = [make_request(3), make_request(3)]
    for request in requests:
        rig.scheduler.add(request)
    step = rig.send()
    result = rig.worker.execute(step.descriptor)
    result.token_ids = b"\xff" * 4 + result.token_ids[4:]
    broken, sound = rig.scheduler.update(step, result)
    assert isinstance(broken.error, RequestFaultError)
    assert (broken.token_ids, len(sound.token_ids)) == ([], 1)
    assert rig.scheduler.counts.output_tokens == 1
    assert rig.scheduler.num_running == 1


def test_a_prefix_that_others_computed_outlives_a_step_that_fails():
    rig = Rig()
    first = make_request(list(range(13)), max_tokens=1)
    rig.scheduler.add(first)
    list(rig.run())
    second = make_request([*range(12), 50, 51, 52], max_tokens=3)
    rig.scheduler.add(second)
    rig.worker.memory_tokens = 1
    rig.send()
    rig.receive()
    rig.worker.memory_tokens = 2**31
    list(rig.run())
    assert second.num_cached_tokens == 12
    assert second.sink.token_ids == expected_output(second.prompt_token_ids, second.sampling)


def test_a_suspect_waits_for_the_results_of_steps_without_it(rig):
    other, suspect = make_request(6), make_request(9)
    rig.scheduler.add(other)
    rig.send()
    suspect.max_num_tokens = len(suspect.token_ids) + 1
    lose_worker(suspect, was_killed=False)
    rig.scheduler.resume(suspect)
    assert rig.scheduler.schedule() is None
    rig.receive()
    assert rig.send().requests == [suspect]
    rig.receive()
    assert [output.request for output in rig.run() if output.is_last] == [other]
