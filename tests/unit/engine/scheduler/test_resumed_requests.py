"""Requests that another engine began."""

import pytest

from services.engine.errors import InvalidRequestError
from services.engine.request import FinishReason
from tests.support.fake_worker import expected_output
from tests.support.requests import make_request, make_sampling
from tests.support.scheduler_rig import Rig


@pytest.mark.parametrize("num_done", [1, 6, 8])
def test_a_request_of_another_engine_goes_on_as_if_it_had_run_here(num_done):
    whole = expected_output(range(5), make_sampling(max_tokens=9))
    rig = Rig(max_num_batched_tokens=4)
    request = make_request(range(5), resumed_token_ids=whole[:num_done], max_tokens=9)
    rig.add(request)
    rig.run()
    assert request.sink.token_ids == whole[num_done:]
    assert request.sink.outputs[-1].finish_reason is FinishReason.LENGTH
    assert rig.scheduler.num_free_blocks == 32


def test_only_the_prompt_of_a_resumed_request_counts_as_cached_prompt():
    rig = Rig()
    first = make_request(range(5), max_tokens=12)
    rig.add(first)
    rig.run()
    second = make_request(range(5), resumed_token_ids=first.sink.token_ids[:8], max_tokens=12)
    rig.add(second)
    rig.run()
    assert second.num_cached_tokens == 5


def test_a_resumed_request_with_nothing_left_to_do_is_refused_with_both_numbers():
    with pytest.raises(InvalidRequestError, match=r"10 tokens already; it can have 10"):
        Rig().add(make_request(4, resumed_token_ids=[1] * 6, max_tokens=6))


def test_a_resumed_request_beyond_the_whole_cache_is_refused():
    with pytest.raises(InvalidRequestError, match=r"9 tokens already; it can have 9"):
        Rig(num_blocks=3).add(make_request(4, resumed_token_ids=[1] * 5, max_tokens=40))
