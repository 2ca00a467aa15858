"""Token buckets and limits, with a clock that the test winds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.access.caller import Caller
from services.frontend.access.held_bytes import HeldBytes
from services.frontend.access.key_file import Limits
from services.frontend.errors import OverloadedError, UnauthenticatedError
from services.transport.counts import LocalCounts


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def caller(clock: Clock, **limits: int) -> Caller:
    counts = LocalCounts(clock=clock)
    return Caller("alice", Limits(**limits), counts=counts, account="a")


def test_a_minutes_worth_may_be_used_at_once_and_comes_back_steadily(clock):
    alice = caller(clock, tokens_per_minute=60)
    alice.begin().charge_prompt(60)
    with pytest.raises(OverloadedError, match="60 tokens per minute") as refused:
        alice.begin()
    assert refused.value.retry_after_ms == 1001
    clock.now_s = 1.1
    alice.begin().charge_prompt(1)
    with pytest.raises(OverloadedError):
        alice.begin().charge_prompt(1)


def test_output_may_overdraw_and_the_next_request_waits_for_the_debt(clock):
    alice = caller(clock, tokens_per_minute=60)
    running = alice.begin()
    for _ in range(180):
        running.charge_output(1)
    with pytest.raises(OverloadedError) as refused:
        alice.begin()
    assert refused.value.retry_after_ms == 121_001
    clock.now_s = 121.1
    alice.begin()


def test_a_prompt_larger_than_a_minutes_worth_needs_a_full_bucket(clock):
    alice = caller(clock, tokens_per_minute=60)
    alice.begin().charge_output(1)
    with pytest.raises(OverloadedError):
        alice.begin().charge_prompt(1000)
    clock.now_s = 2
    alice.begin().charge_prompt(1000)
    with pytest.raises(OverloadedError) as refused:
        alice.begin()
    assert refused.value.retry_after_ms == pytest.approx(941_000, abs=10)


def test_what_was_never_run_costs_nothing(clock):
    alice = caller(clock, tokens_per_minute=60, max_live_requests=1)
    refused = alice.begin()
    refused.charge_prompt(60)
    refused.cancel()
    alice.begin().charge_prompt(60)


def test_slots_are_counted_until_they_are_freed(clock):
    alice = caller(clock, max_live_requests=2)
    first, _ = alice.begin(), alice.begin()
    with pytest.raises(OverloadedError, match="2 unfinished requests; its limit is 2") as refused:
        alice.begin()
    assert refused.value.retry_after_ms is not None
    stops = [lambda: None, lambda: None]
    for stop in stops:
        first.attach(stop)
    first.detach(stops[0])
    with pytest.raises(OverloadedError):
        alice.begin()  # one of its streams still runs
    first.detach(stops[1])
    first.detach(stops[1])
    alice.begin()
    with pytest.raises(OverloadedError):
        alice.begin()


def test_limits_may_change_while_requests_run(clock):
    alice = caller(clock)
    alice.begin().charge_output(10_000)
    alice.limits = Limits(tokens_per_minute=60)
    alice.begin().charge_prompt(60)
    alice.limits = Limits(tokens_per_minute=6000)
    with pytest.raises(OverloadedError):
        alice.begin()
    clock.now_s = 0.1
    alice.begin().charge_prompt(10)


def test_a_removed_key_stops_what_runs_and_refuses_what_comes(clock):
    alice = caller(clock)
    lease, stopped = alice.begin(), []
    lease.attach(lambda: stopped.append(True))
    alice.revoke()
    assert stopped == [True]
    with pytest.raises(UnauthenticatedError, match="removed"):
        lease.charge_output(1)
    with pytest.raises(UnauthenticatedError, match="removed"):
        alice.begin()


def test_frontends_that_share_counts_share_a_keys_slots_and_tokens(clock):
    counts = LocalCounts(clock=clock)
    limits = Limits(max_live_requests=1, tokens_per_minute=60)
    one, other = (Caller("alice", limits, counts=counts, account="a") for _ in range(2))
    running = one.begin()
    with pytest.raises(OverloadedError, match="limit is 1"):
        other.begin()
    running.charge_prompt(60)
    running.close()
    running.close()
    with pytest.raises(OverloadedError, match="60 tokens per minute"):
        other.begin()


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 30)), max_size=60))
def test_no_pattern_of_requests_gets_more_prompt_tokens_than_bucket_and_rate_give(pattern):
    clock, used = Clock(), 0
    alice = caller(clock, tokens_per_minute=60)
    for num_tokens, pause_s in pattern:
        clock.now_s += pause_s
        try:
            lease = alice.begin()
        except OverloadedError:
            continue
        try:
            lease.charge_prompt(num_tokens)
        except OverloadedError:
            lease.cancel()
        else:
            used += num_tokens
    # One request may overdraw by what it is larger than the bucket.
    assert used <= 60 + clock.now_s + 200


def test_bytes_are_held_until_the_slot_is_released(clock):
    alice, counts = caller(clock), LocalCounts()
    held = HeldBytes(counts, "bytes", "things", limit=10, limit_per_account=10)
    lease = alice.begin()
    lease.hold(held, 4)
    lease.hold(held, 5)
    with pytest.raises(OverloadedError, match="your things have 9 bytes; the limit is 10"):
        lease.hold(held, 2)
    assert counts.held("bytes") == 9
    lease.close()
    lease.close()
    assert counts.held("bytes") == 0


def test_bytes_that_are_held_meanwhile_are_given_back_at_once(clock):
    alice, counts = caller(clock), LocalCounts()
    held = HeldBytes(counts, "bytes", "things", limit=10, limit_per_account=10)
    lease = alice.begin()
    lease.hold(held, 4)
    with lease.holding_meanwhile():
        lease.hold(held, 5)
    assert counts.held("bytes") == 4
    lease.close()
    assert counts.held("bytes") == 0
