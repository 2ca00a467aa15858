"""The order in which waiting requests are served."""

from services.engine.request import Request, RequestStatus
from services.engine.scheduler.waiting_queue import WaitingQueue
from tests.support.requests import make_request


def waiting(arrival_index: int, priority: int = 0) -> Request:
    request = make_request(1, priority=priority)
    request.arrival_index = arrival_index
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
