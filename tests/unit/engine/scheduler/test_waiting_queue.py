"""The order in which waiting requests are served."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.request import Request, RequestStatus, StepMark
from services.engine.scheduler.waiting_queue import WaitingQueue, rank_s
from tests.support.requests import make_request

AGEING_S = 10.0


def waiting(arrival_index: int, priority: int = 0) -> Request:
    request = make_request(1, priority=priority, arrival_s=float(arrival_index))
    request.arrival_index = arrival_index
    request.rank_s = rank_s(request.arrival_s, priority, AGEING_S)
    return request


def worth_s(priority: int) -> float:
    """Seconds of waiting that a priority is worth."""
    return -rank_s(0, priority, AGEING_S)


def test_higher_priority_comes_first_then_earlier_arrival():
    early, late, urgent = waiting(0), waiting(1), waiting(2, priority=1)
    queue = WaitingQueue()
    for request in (late, urgent, early):
        queue.push(request)
    assert [queue.pop() for _ in range(3)] == [urgent, early, late]
    assert len(queue) == 0
    assert queue.peek() is None


def test_a_discarded_request_is_never_handed_out():
    first, second = waiting(0), waiting(1)
    queue = WaitingQueue()
    queue.push(first)
    queue.push(second)
    first.status = RequestStatus.FINISHED
    queue.discard(first)
    assert len(queue) == 1
    assert queue.peek() is second


def test_a_request_that_comes_back_with_a_later_rank_has_lost_its_place():
    first, second, third = waiting(0), waiting(1), waiting(2)
    queue = WaitingQueue()
    for request in (first, second, third):
        queue.push(request)
    assert queue.pop() is first
    first.rank_s = 9.0
    queue.push(first)
    assert [queue.pop() for _ in range(3)] == [second, third, first]


def test_discarded_requests_do_not_pile_up():
    queue = WaitingQueue()
    keeper = waiting(0)
    queue.push(keeper)
    for i in range(1, 1000):
        request = waiting(i)
        queue.push(request)
        request.status = RequestStatus.FINISHED
        queue.discard(request)
    assert len(queue._by_rank) < 10
    assert queue.pop() is keeper


@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 30), st.integers(-3, 3)), st.just("serve")), max_size=60
    )
)
def test_a_request_is_overtaken_only_by_requests_that_came_soon_enough_after_it(events):
    """Whatever comes: no request is passed by one that came later than its rank allows."""
    queue, now_s, served, pushed = WaitingQueue(), 0, [], []
    for event in events:
        if event == "serve":
            if len(queue):
                served.append(queue.pop())
        else:
            pause_s, priority = event
            now_s += pause_s
            pushed.append(waiting(now_s, priority))
            pushed[-1].arrival_index = len(pushed)
            queue.push(pushed[-1])
    while len(queue):
        served.append(queue.pop())
    assert sorted(map(id, served)) == sorted(map(id, pushed))
    for i, first in enumerate(served):
        for later in served[i + 1 :]:
            if later.arrival_s < first.arrival_s:  # it was overtaken
                lead_s = worth_s(first.priority) - worth_s(later.priority)
                assert first.arrival_s - later.arrival_s <= lead_s


def test_a_flood_of_urgent_requests_does_not_starve_an_ordinary_one():
    queue = WaitingQueue()
    ordinary = waiting(0)
    queue.push(ordinary)
    for second in range(1, 1000):
        queue.push(waiting(second, priority=5))
        if queue.pop() is ordinary:
            break
    assert second == 26  # log2(1 + 5) * 10 s


@pytest.mark.parametrize(("priority", "head_start_s"), [(0, 0), (1, 10), (3, 20), (100, 66.6)])
def test_the_priority_that_waiting_makes_up_for_doubles(priority, head_start_s):
    assert rank_s(0, priority, AGEING_S) == pytest.approx(-head_start_s, abs=0.1)
    assert rank_s(0, -priority, AGEING_S) == pytest.approx(head_start_s, abs=0.1)


def test_the_oldest_is_known_and_may_be_promoted_once_or_often():
    queue = WaitingQueue()
    old, *others = [waiting(index, priority=index) for index in range(4)]
    for request in (others[1], old, others[0], others[2]):
        queue.push(request)
    assert queue.oldest() is old
    for rank in (-100.0, -200.0):
        queue.promote(old, rank)
    assert [queue.pop() for _ in range(len(queue))] == [old, *reversed(others)]
    assert queue.oldest() is None


def test_new_requests_are_held_while_preempted_ones_go_on():
    new, begun, later, ended = waiting(0), waiting(1), waiting(2), waiting(3)
    begun.started = StepMark(1, 0.0)
    queue = WaitingQueue()
    for request in (new, begun):
        queue.push(request)
    queue.hold_new()
    for request in (later, ended):
        queue.push(request)
    assert (len(queue), set(queue)) == (4, {new, begun, later, ended})
    queue.discard(ended)
    assert queue.pop() is begun
    assert (queue.peek(), queue.oldest(), len(queue)) == (None, None, 2)
    queue.push(begun)
    assert queue.peek() is begun
    queue.release_new()
    assert [queue.pop() for _ in range(3)] == [new, begun, later]
    queue.release_new()
    assert len(queue) == 0
