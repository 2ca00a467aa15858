"""The order in which waiting requests are served."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.request import Request, RequestStatus
from services.engine.scheduler.waiting_queue import WaitingQueue, rank_s
from tests.support.requests import make_request

AGEING_S = 10.0


def waiting(arrival_index: int, priority: int = 0) -> Request:
    request = make_request(1, priority=priority, arrival_s=float(arrival_index))
    request.arrival_index = arrival_index
    request.rank_s = rank_s(request.arrival_s, priority, AGEING_S)
    return request


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


def test_discarded_requests_do_not_pile_up():
    queue = WaitingQueue()
    keeper = waiting(0)
    queue.push(keeper)
    for i in range(1, 1000):
        request = waiting(i)
        queue.push(request)
        request.status = RequestStatus.FINISHED
        queue.discard(request)
    assert len(queue._heap) < 10
    assert queue.pop() is keeper


@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 30), st.integers(-3, 3)), st.just("serve")), max_size=60
    )
)
def test_a_request_is_overtaken_only_by_those_that_came_soon_enough_behind_it(events):
    """Whatever comes: nobody is passed by a request that came later than its rank allows."""
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
                lead_s = (first.priority - later.priority) * AGEING_S
                assert first.arrival_s - later.arrival_s <= lead_s


def test_a_flood_of_urgent_requests_does_not_starve_an_ordinary_one():
    queue = WaitingQueue()
    ordinary = waiting(0)
    queue.push(ordinary)
    for second in range(1, 1000):
        queue.push(waiting(second, priority=5))
        if queue.pop() is ordinary:
            break
    assert second == 50  # where both rank alike, the one that came first goes first
