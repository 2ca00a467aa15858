"""Requests that get vectors end with their prompts."""

import numpy as np

from services.engine.batch import read_float32
from services.engine.errors import RequestFaultError
from services.engine.request import FinishReason, RequestStatus
from tests.support.fake_worker import expected_vector
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig, q_lens


def vector_of(request):
    [output] = request.sink.outputs
    assert output.finish_reason is FinishReason.STOP
    return read_float32(output.vector).tolist()


def test_prompts_are_packed_and_end_with_their_vectors():
    rig = Rig(pooling="mean")
    requests = [make_request(length, max_tokens=1) for length in (1, 30, 5, 16, 7)]
    rig.add(*requests)
    assert q_lens(rig.send()) == [1, 15]
    rig.run()
    for request in requests:
        assert vector_of(request) == expected_vector(request.prompt_token_ids)
        assert request.num_output_tokens == 0
    assert rig.scheduler.num_free_blocks == 32


def test_the_prefix_cache_serves_the_last_token_alone():
    for pooling, num_cached in (("last", 12), ("mean", 0), ("cls", 0)):
        rig = Rig(pooling=pooling)
        for _ in range(2):
            rig.add(make_request(list(range(14)), max_tokens=1))
            rig.run()
        assert rig.scheduler.counts.cached_tokens == num_cached


def test_preempted_prompts_start_over():
    rig = Rig(pooling="mean", num_blocks=10, max_num_batched_tokens=6)
    requests = [make_request(30, max_tokens=1) for _ in range(4)]
    rig.add(*requests)
    rig.send()
    rig.receive()
    rig.scheduler._holdings.preempt_last()
    rig.run()
    for request in requests:
        assert vector_of(request) == expected_vector(request.prompt_token_ids)


def test_a_vector_that_is_not_finite_fails_its_request_alone():
    rig = Rig(pooling="last")
    requests = [make_request(4, max_tokens=1) for _ in range(2)]
    rig.add(*requests)
    step = rig.send()
    result = rig.worker.execute(step.descriptor)
    vectors = read_float32(result.pooled).reshape(2, -1).copy()
    vectors[0, 1] = np.nan
    result.pooled = vectors.tobytes()
    bad, good = rig.scheduler.update(step, result)
    assert isinstance(bad.error, RequestFaultError)
    assert bad.finish_reason is None
    assert good.vector == vectors[1].tobytes()


def test_a_request_that_was_aborted_in_flight_has_no_output():
    rig = Rig(pooling="last")
    request = make_request(4, max_tokens=1)
    rig.add(request)
    rig.send()
    rig.scheduler.abort(request)
    assert rig.receive() == []
    assert request.status is RequestStatus.FINISHED
