"""An engine that fails is spared, tried now and then, and trusted again once it works."""

import pytest

from services.frontend.engine_client.circuit_breaker import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    MAX_FAILURES,
    CircuitBreaker,
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker("engine:1", clock=clock)


def fail(breaker: CircuitBreaker, times: int = MAX_FAILURES) -> None:
    for _ in range(times):
        breaker.note_failure()


def probe(breaker: CircuitBreaker, clock: Clock) -> None:
    clock.now_s += breaker.wait_s
    breaker.note_sent()


def test_failures_in_a_row_open_it(breaker):
    fail(breaker, MAX_FAILURES - 1)
    assert not breaker.is_open
    breaker.note_failure()
    assert breaker.is_open
    assert breaker.wait_s == FIRST_PAUSE_S


def test_a_success_between_failures_starts_the_count_again(breaker):
    fail(breaker, MAX_FAILURES - 1)
    breaker.note_success()
    fail(breaker, MAX_FAILURES - 1)
    assert not breaker.is_open


def test_one_request_passes_after_each_pause(breaker, clock):
    fail(breaker)
    clock.now_s += FIRST_PAUSE_S
    assert breaker.wait_s == 0
    breaker.note_sent()
    assert breaker.wait_s == FIRST_PAUSE_S


def test_a_probe_that_works_closes_it(breaker, clock):
    fail(breaker)
    probe(breaker, clock)
    breaker.note_success()
    assert not breaker.is_open
    assert breaker.wait_s == 0


def test_each_probe_that_fails_doubles_the_pause_up_to_a_limit(breaker, clock):
    fail(breaker)
    pauses = []
    for _ in range(7):
        probe(breaker, clock)
        breaker.note_failure()
        pauses.append(breaker.wait_s)
    assert pauses[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LAST_PAUSE_S


def test_requests_that_were_sent_before_it_opened_do_not_lengthen_the_pause(breaker):
    fail(breaker, 10 * MAX_FAILURES)
    assert breaker.wait_s == FIRST_PAUSE_S
