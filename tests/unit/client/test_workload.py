"""The benchmark's plan and figures."""

import pytest

from services.client.bench.report import report
from services.client.bench.runner import Run, Timing
from services.client.bench.workload import Load, plan
from services.client.errors import UnavailableError


def test_the_same_seed_plans_the_same_requests():
    assert plan(Load(seed=3, rate=5.0)) == plan(Load(seed=3, rate=5.0))
    assert plan(Load(seed=3)) != plan(Load(seed=4))


def test_lengths_stay_in_their_ranges():
    planned = plan(Load(num_requests=500, prompt_tokens="5-9", output_tokens="3"))
    assert {request.prompt_tokens for request in planned} == {5, 6, 7, 8, 9}
    assert {request.output_tokens for request in planned} == {3}


def test_open_loop_arrivals_have_the_rate_that_was_asked_for():
    planned = plan(Load(num_requests=4000, rate=20.0))
    assert planned[-1].arrival_s == pytest.approx(200, rel=0.1)
    arrivals = [request.arrival_s for request in planned]
    assert arrivals == sorted(arrivals)


def test_a_closed_loop_has_no_arrival_times():
    assert {request.arrival_s for request in plan(Load())} == {0.0}


@pytest.mark.parametrize("text", ["", "0", "a-b", "7-3", "-4", "1-2-3"])
def test_a_length_that_is_no_range_is_refused(text):
    with pytest.raises(ValueError, match="LOW-HIGH"):
        Load(prompt_tokens=text)


def test_failed_requests_are_counted_apart_and_left_out_of_the_latencies():
    good = Timing(prompt_tokens=4, output_tokens=3, ttft_s=0.1, gaps_s=[0.02, 0.04], elapsed_s=0.16)
    bad = Timing(prompt_tokens=4, elapsed_s=9.0, error=UnavailableError("gone", code="UNAVAILABLE"))
    result = report(Run(timings=[good, bad], elapsed_s=2.0), Load(), "here")
    assert result["num_failed"] == {"UNAVAILABLE": 1}
    assert result["first_failure"] == {"UNAVAILABLE": "gone"}
    assert result["ttft_ms"]["p50"] == pytest.approx(100)
    assert result["inter_token_ms"]["p50"] == pytest.approx(30)
    assert result["e2e_ms"]["p99"] == pytest.approx(160)
    assert result["output_tokens_per_s"] == pytest.approx(1.5)


def test_a_run_without_success_has_no_latencies():
    bad = Timing(prompt_tokens=4, error=UnavailableError("gone", code="UNAVAILABLE"))
    assert report(Run(timings=[bad], elapsed_s=1.0), Load(), "here")["ttft_ms"]["p50"] is None
