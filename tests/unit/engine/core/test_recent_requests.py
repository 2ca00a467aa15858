"""The memory of recent steps and requests is bounded, and finds the longest gap."""

import time

from services.engine.core.recent_requests import RecentRequests, RequestStory
from services.engine.core.recent_steps import RecentSteps
from tests.support.requests import make_request


def test_the_longest_gap_lies_between_two_steps_of_the_time():
    steps = RecentSteps(max_steps=8)
    for step_id, at_s in enumerate((1, 2, 9, 10, 12, 13), start=1):
        steps.add(step_id, at_s, num_tokens=10 * step_id, batch_size=step_id)
    gap = steps.longest_gap(9, 13)
    assert (gap.step_id, gap.seconds, gap.num_tokens, gap.batch_size) == (5, 2, 50, 5)
    assert steps.longest_gap(0, 20).step_id == 3
    assert steps.longest_gap(13, 20) is None


def test_old_steps_are_overwritten():
    steps = RecentSteps(max_steps=4)
    for step_id in range(1, 8):
        steps.add(step_id, 100 if step_id == 1 else step_id, num_tokens=1, batch_size=1)
    assert steps.longest_gap(0, 1000).seconds == 1
    assert steps.longest_gap(0, 3) is None


def test_the_oldest_request_is_forgotten_and_an_id_may_come_again():
    recent = RecentRequests(RecentSteps(), max_requests=2)
    for request_id, end in (("a", "stop"), ("b", "stop"), ("a", "length"), ("c", "stop")):
        request = make_request(request_id=request_id)
        recent.add(RequestStory.of(request, time.monotonic(), end))
    assert recent.find("b") is None
    assert recent.find("a").end == "length"
    assert recent.longest_gap(recent.find("c")) is None
