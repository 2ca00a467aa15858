"""Observations that a step and an ended request add to the histograms."""

import pytest

from services.engine.core.latencies import Latencies
from services.engine.request import RequestOutput, StepMark
from services.engine.scheduler.step_outputs import StepOutputs
from tests.support.engine_harness import RecordingSink, make_request


def arrived(at_s: float = 10.0):
    request = make_request(RecordingSink())
    request.arrival_s = at_s
    return request


def step(latencies, at_s, *requests, num_tokens=1, step_id=1):
    """Brings requests tokens as the scheduler does."""
    mark, outputs = StepMark(step_id, at_s), []
    for request in requests:
        outputs.append(RequestOutput(request, [5] * num_tokens, previous=request.last_token))
        if num_tokens:
            request.first_token = request.first_token or mark
            request.last_token = mark
    latencies.count_step(StepOutputs(others=outputs))


def num(histogram) -> int:
    return sum(histogram.counts)


def test_the_first_token_and_the_gaps_after_it_are_counted_apart():
    latencies, request = Latencies(), arrived()
    for at_s in (12.0, 12.5, 13.5):
        step(latencies, at_s, request)
    assert (num(latencies.time_to_first_token), latencies.time_to_first_token.sum) == (1, 2.0)
    assert (num(latencies.inter_token_latency), latencies.inter_token_latency.sum) == (2, 1.5)


def test_requests_of_one_step_are_counted_each():
    latencies, requests = Latencies(), [arrived() for _ in range(5)]
    step(latencies, 11.0, *requests)
    step(latencies, 12.0, *requests[:3])
    step(latencies, 14.0, *requests)
    assert num(latencies.inter_token_latency) == 8
    assert latencies.inter_token_latency.sum == pytest.approx(3 * 1 + 3 * 2 + 2 * 3)


def test_tokens_that_come_together_share_the_gap():
    latencies, request = Latencies(), arrived()
    step(latencies, 11.0, request)
    step(latencies, 12.0, request, num_tokens=4)
    assert num(latencies.inter_token_latency) == 4
    assert latencies.inter_token_latency.sum == pytest.approx(1.0)


def test_a_request_that_ends_reports_its_phases():
    latencies, request = Latencies(), arrived()
    request.started = StepMark(1, 11.0)
    step(latencies, 13.0, request)
    step(latencies, 17.0, request)
    latencies.count_end(request, 18.0)
    sums = [
        latencies.request_queue_time.sum,
        latencies.request_prefill_time.sum,
        latencies.request_decode_time.sum,
        latencies.e2e_request_latency.sum,
        latencies.request_prompt_tokens.sum,
    ]
    assert sums == [1.0, 2.0, 4.0, 8.0, 3.0]


def test_a_request_that_never_ran_has_only_waited():
    latencies, request = Latencies(), arrived()
    latencies.count_end(request, 12.0)
    assert latencies.request_queue_time.sum == 2.0
    assert num(latencies.request_prefill_time) == num(latencies.request_decode_time) == 0


def test_a_step_that_ends_a_request_without_a_token_is_no_first_token():
    latencies, request = Latencies(), arrived()
    step(latencies, 12.0, request, num_tokens=0)
    assert num(latencies.time_to_first_token) == 0
    assert request.first_token is None
