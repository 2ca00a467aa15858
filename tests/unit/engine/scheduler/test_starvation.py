"""No request starves, however many requests of high priority come, without time passing."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.config.scheduler import PROMPT_SHARE
from services.engine.errors import QueueFullError
from services.engine.request import MAX_PRIORITY, Request, RequestStatus
from services.engine.scheduler.holdings import MAX_OVERTAKINGS
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig

MAX_MODEL_LEN = 32


def urgent(num_prompt: int = 1, max_tokens: int = 1, *, start: int = 0) -> Request:
    prompt = range(start, start + num_prompt)
    return make_request(prompt, priority=MAX_PRIORITY, max_tokens=max_tokens)


def fill(rig: Rig, requests) -> None:
    """Adds requests until the queue is full."""
    for request in requests:
        try:
            rig.add(request)
        except QueueFullError:
            return


def is_over(request: Request) -> bool:
    return request.status is RequestStatus.FINISHED


@given(
    num_blocks=st.integers(9, 40),
    max_num_seqs=st.integers(1, 5),
    budget=st.sampled_from([1, 4, 16, 40]),
    ordinary=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 10), st.integers(-MAX_PRIORITY, 1)),
        min_size=1,
        max_size=4,
    ),
    flood=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=7),
    depth=st.integers(1, 2),
)
@settings(max_examples=80)
def test_all_requests_end_in_a_bounded_number_of_steps_under_an_endless_flood(
    num_blocks, max_num_seqs, budget, ordinary, flood, depth
):
    rig = Rig(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
    )
    victims = [
        make_request(range(100 * i, 100 * i + num_prompt), priority=priority, max_tokens=max_tokens)
        for i, (num_prompt, max_tokens, priority) in enumerate(ordinary)
    ]
    rig.add(*victims)
    # The requests served before the last victim: every victim, as many of the flood as may pass
    # each of them, and the ones that run beside them. The first in order gets a token in every
    # step.
    num_served = len(victims) * (1 + MAX_OVERTAKINGS) + 2 * max_num_seqs
    for num_steps in range(2 * num_served * MAX_MODEL_LEN):
        if all(map(is_over, victims)):
            break
        fill(rig, (urgent(*flood[(num_steps + i) % len(flood)], start=500) for i in range(9)))
        step = rig.scheduler.schedule() if len(rig.in_flight) < depth else None
        if step is not None:
            rig.in_flight.append(step)
        else:
            rig.receive()
    assert all(map(is_over, victims))


def test_the_oldest_is_next_after_three_later_arrivals():
    rig = Rig(max_num_seqs=1)
    victim = make_request(3, max_tokens=1)
    flood = [urgent() for _ in range(7)]
    rig.add(victim, *flood)
    ended = [output.request for _ in range(8) for output in rig.step()]
    assert ended.index(victim) == MAX_OVERTAKINGS
    assert len(ended) == 8


def test_what_came_in_by_its_age_is_not_preempted_by_later_arrivals():
    rig = Rig(max_num_seqs=2, num_blocks=9)
    victim = make_request(4, max_tokens=20)
    rig.add(*(urgent() for _ in range(3)), victim)
    for _ in range(200):
        fill(rig, [urgent(4, 20)])
        rig.step()
    assert is_over(victim)
    assert not victim.num_preemptions


def test_the_first_prompt_keeps_its_share_of_steps_that_urgent_prompts_fill():
    rig = Rig(num_blocks=400, max_model_len=400, max_num_seqs=20, max_num_waiting=100)
    victim = make_request(range(1000, 1100), max_tokens=1)
    rig.add(victim)
    rig.step()
    share = rig.limits.max_num_batched_tokens // PROMPT_SHARE
    for _ in range(100 // share):
        before = victim.num_computed_tokens
        fill(rig, [urgent(100, start=2000 + 100 * rig.scheduler.next_step_id)])
        rig.step()
        assert is_over(victim) or victim.num_computed_tokens - before >= share
    assert is_over(victim)


def test_a_prompt_that_leaves_no_doubt_takes_the_whole_step():
    rig = Rig(max_num_batched_tokens=16)
    first, second = make_request(30), make_request(30)
    rig.add(first, second)
    step = rig.send()
    assert step.descriptor.context.num_tokens == 16
    assert second.status is RequestStatus.WAITING
