"""Outputs of one prompt are requests of their own that share what one of them computed."""

from services.engine.scheduler import planned_step
from tests.support.fake_worker import expected_output
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig


def test_its_full_blocks_are_computed_once_though_all_come_at_the_same_time():
    rig = Rig(max_num_batched_tokens=64)
    prompt = list(range(18))
    same = [make_request(prompt, seed=i) for i in range(4)]
    rig.add(*same)
    step = rig.send()
    # 18 tokens of the first, and of each other one the two that fill no block.
    assert step.descriptor.context.num_tokens == 18 + 3 * 2
    assert len({tuple(request.block_ids[:4]) for request in same}) == 1
    assert [request.num_cached_tokens for request in same] == [0, 16, 16, 16]
    rig.receive()
    rig.run()
    for request in same:
        assert request.sink.token_ids == expected_output(prompt, request.sampling)


def test_they_wait_for_a_prompt_that_comes_in_chunks_even_if_there_is_room():
    rig = Rig(max_num_batched_tokens=10)
    rig.add(make_request(2, max_tokens=2))
    rig.step()
    prompt = list(range(24))
    first, second = make_request(prompt), make_request(prompt, seed=1)
    rig.add(first, second)
    computed = 0
    while first.num_computed_tokens < 24:
        step = rig.send()
        rig.receive()
        computed += step.descriptor.context.num_tokens
        assert second.row is None or first.num_computed_tokens >= 24
    rig.run()
    assert second.num_cached_tokens == 20
    assert second.sink.token_ids == expected_output(prompt, second.sampling)


def test_no_request_waits_for_a_prompt_of_another_tenant(monkeypatch):
    monkeypatch.setattr(planned_step, "MAX_PROMPT_LOGPROBS", 4)
    rig = Rig(max_num_batched_tokens=64)
    prompt = list(range(24))
    first = make_request(prompt, prompt_logprobs=1, cache_salt="a")
    second = make_request(prompt, cache_salt="b")
    rig.add(first, second)
    # The first one's chunk, which its log-probabilities cut, fills no block and leaves room.
    assert rig.send().descriptor.context.num_tokens == 2 + 24


def test_they_wait_for_a_prompt_whose_chunks_are_smaller_than_the_room(monkeypatch):
    monkeypatch.setattr(planned_step, "MAX_PROMPT_LOGPROBS", 8)
    rig = Rig(max_num_batched_tokens=64)
    first = make_request(24, prompt_logprobs=1)
    second = make_request(first.prompt_token_ids, seed=1)
    rig.add(first, second)
    while first.num_computed_tokens < 20:
        rig.step()
        assert second.row is None or first.num_computed_tokens >= 20
    rig.run()
    assert second.num_cached_tokens == 20
    assert second.sink.token_ids == expected_output(first.prompt_token_ids, second.sampling)
