"""Tokens of a step's result that a request keeps, and its end."""

from services.engine.request import FinishReason
from services.engine.scheduler.sampled_tokens import cut_at_end
from tests.support.fake_worker import FakeWorker
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig, end_token_after


def test_an_end_token_ends_the_request_and_is_in_its_output():
    rig = Rig()
    request = make_request(6)
    token_id = end_token_after(request.prompt_token_ids, 3)
    request = make_request(request.prompt_token_ids, end_token_ids=[token_id])
    rig.add(request)
    rig.run()
    last = request.sink.outputs[-1]
    assert last.finish_reason is FinishReason.STOP
    assert last.stop_token_id == token_id
    assert request.sink.token_ids[-1] == token_id
    assert len(request.sink.token_ids) == 3


def test_a_token_sampled_after_the_end_is_dropped():
    rig = Rig()
    prompt = make_request(6).prompt_token_ids
    rig.add(make_request(prompt, end_token_ids=[end_token_after(prompt, 1)]))
    rig.send()
    rig.send()
    assert len(rig.receive()) == 1
    assert rig.receive() == []
    assert rig.scheduler.counts.output_tokens == 1


def test_no_end_token_ends_a_request_before_min_tokens():
    rig = Rig()
    request = make_request(6, min_tokens=3, max_tokens=9, end_token_ids=range(1000))
    rig.worker = FakeWorker(
        max_num_seqs=4, max_model_len=64, num_blocks=33, block_size=4, vocab_size=2000
    )
    rig.add(request)
    rig.run()
    assert request.num_output_tokens > 3


def test_output_is_bounded_by_the_context_length():
    rig = Rig(max_model_len=10)
    request = make_request(7, max_tokens=99)
    rig.add(request)
    rig.run()
    assert len(request.sink.token_ids) == 3
    assert request.sink.outputs[-1].finish_reason is FinishReason.LENGTH


def test_output_is_bounded_by_the_cache_when_the_request_has_it_to_itself():
    rig = Rig(num_blocks=3)
    request = make_request(7, max_tokens=50)
    rig.add(request)
    rig.run()
    # The keys and values of the last token are never needed: nine tokens in eight slots.
    assert len(request.token_ids) == 9
    assert request.sink.outputs[-1].finish_reason is FinishReason.LENGTH


def cut(tokens, *, num_output=0, **sampling):
    request = make_request([1, 2, 3], **sampling)
    request.max_num_tokens = 3 + request.sampling.max_tokens
    request.token_ids += [50] * num_output
    return cut_at_end(request, tokens)


def test_tokens_after_an_end_token_are_dropped():
    assert cut([4, 9, 5, 9], end_token_ids=[9]) == [4, 9]
    assert cut([4, 5], end_token_ids=[9]) == [4, 5]


def test_tokens_past_max_tokens_are_dropped():
    assert cut([4, 5, 6, 7], max_tokens=6, num_output=4) == [4, 5]


def test_an_end_token_among_the_first_min_tokens_ends_nothing():
    options = {"end_token_ids": [9], "min_tokens": 4}
    assert cut([9, 9, 9, 5], num_output=2, **options) == [9, 9, 9]
    assert cut([9, 9], num_output=2, **options) == [9, 9]
    assert cut([9, 9], num_output=4, **options) == [9]
