"""Which requests are refused, wait or start."""

import pytest

from services.engine.errors import InvalidRequestError, QueueFullError
from tests.support.fake_worker import expected_output
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig, q_lens


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers():
    with pytest.raises(InvalidRequestError, match=r"64 tokens.*max_model_len, which is 64"):
        Rig().add(make_request(64))


def test_a_prompt_beyond_the_whole_cache_is_refused_with_both_numbers():
    with pytest.raises(InvalidRequestError, match=r"9 tokens; the KV cache holds 8"):
        Rig(num_blocks=3).add(make_request(9))


def test_a_full_queue_refuses_and_says_when_to_try_again():
    rig = Rig(max_num_waiting=1)
    rig.add(make_request())
    with pytest.raises(QueueFullError, match="the limit is 1") as refusal:
        rig.add(make_request())
    assert refusal.value.retry_after_ms == 1000


def test_a_refused_request_leaves_nothing():
    rig = Rig()
    with pytest.raises(InvalidRequestError):
        rig.add(make_request(64))
    assert not rig.scheduler.has_work


def test_no_more_requests_run_than_there_are_rows_or_tokens():
    by_rows, by_tokens = Rig(max_num_seqs=2), Rig(max_num_batched_tokens=3)
    for rig, most in ((by_rows, 2), (by_tokens, 3)):
        rig.add(*(make_request(1) for _ in range(4)))
        for _ in range(3):
            rig.step()
        assert rig.scheduler.num_running == most


def test_higher_priority_is_admitted_first_and_equal_priority_by_arrival():
    rig = Rig(max_num_seqs=1)
    requests = [make_request(2, priority=p, max_tokens=1) for p in (0, 0, 5)]
    rig.add(*requests)
    order = [rig.step()[0].request for _ in requests]
    assert order == [requests[2], requests[0], requests[1]]


def test_no_request_overtakes_one_that_finds_no_blocks():
    rig = Rig(num_blocks=6)
    rig.add(make_request(12), make_request(12), make_request(1))
    rig.step()
    assert rig.scheduler.num_running == 1
    assert rig.scheduler.num_waiting == 2


def test_no_request_is_admitted_in_a_step_that_preempted():
    rig = Rig(num_blocks=6, max_num_batched_tokens=32)
    rig.add(make_request(9), make_request(8))
    rig.step()
    rig.add(make_request(1, priority=9))
    rig.step()
    assert rig.scheduler.counts.num_preemptions == 1
    assert rig.scheduler.num_running == 1
    rig.step()
    assert rig.scheduler.num_running == 2


def test_the_second_of_two_equal_prompts_finds_its_prefix_in_the_same_step():
    rig = Rig()
    first, second = make_request(range(10)), make_request(range(10), seed=1)
    rig.add(first, second)
    assert q_lens(rig.send()) == [10, 2]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert rig.scheduler.counts.prompt_tokens == 20
    assert rig.scheduler.counts.cached_tokens == 8
    rig.run()
    assert second.sink.token_ids == expected_output(range(10), second.sampling)


def test_a_finished_conversation_is_found_with_its_output():
    rig = Rig()
    first = make_request(range(10), max_tokens=7)
    rig.add(first)
    rig.run()
    follow_up = make_request([*first.token_ids, 1, 2])
    rig.add(follow_up)
    rig.step()
    assert follow_up.num_cached_tokens == 16
