"""Rules for whole steps; test_scheduler_machine.py has all rules at once."""

import pytest

from services.engine.request import FinishReason
from tests.support.fake_worker import expected_output
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig, q_lens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_get_what_they_would_get_alone(depth):
    rig = Rig()
    requests = [make_request(5 + i, seed=i, max_tokens=9) for i in range(8)]
    rig.add(*requests)
    rig.run(depth=depth)
    for request in requests:
        assert request.sink.token_ids == expected_output(request.token_ids[:-9], request.sampling)
        assert request.sink.outputs[-1].finish_reason is FinishReason.LENGTH


def test_an_abort_frees_everything_at_once_even_with_steps_in_flight():
    rig = Rig()
    running = make_request(8)
    rig.add(running)
    rig.send()
    rig.send()
    assert rig.scheduler.abort(running)
    assert rig.scheduler.num_free_blocks == 32
    assert not rig.scheduler.has_work
    assert rig.receive() == []
    assert rig.receive() == []
    assert not rig.scheduler.abort(running)


def test_a_waiting_request_can_be_aborted():
    rig = Rig()
    waiting = make_request(8)
    rig.add(waiting)
    assert rig.scheduler.abort(waiting)
    assert rig.scheduler.num_waiting == 0
    assert rig.scheduler.schedule() is None


def test_times_of_the_first_step_and_the_first_token_are_noted():
    rig = Rig()
    request = make_request(4)
    rig.add(request)
    rig.now_s = 101.0
    rig.send()
    rig.now_s = 102.0
    rig.receive()
    rig.now_s = 103.0
    rig.step()
    assert (request.started.at_s, request.first_token.at_s) == (101.0, 102.0)


def test_only_requests_that_asked_get_log_probabilities():
    rig = Rig()
    asked, silent = make_request(4, logprobs=2), make_request(4)
    rig.add(asked, silent)
    rig.step()
    assert len(asked.sink.outputs[0].logprobs[0].top_token_ids) == 2
    assert silent.sink.outputs[0].logprobs == ()


def test_sampling_flags_describe_the_requests_that_sample_in_the_step():
    rig = Rig(max_num_batched_tokens=6)
    rig.add(make_request(4), make_request(9, temperature=1.0, logit_bias=((1, 1.0),), logprobs=0))
    first, second, third = rig.send(), rig.send(), rig.send()
    for step in (first, second):
        sampling = step.descriptor.sampling
        assert sampling.all_greedy
        assert not sampling.needs_logit_edits
        assert not sampling.needs_logprobs
    assert not third.descriptor.sampling.all_greedy
    assert third.descriptor.sampling.needs_logit_edits
    assert third.descriptor.sampling.needs_logprobs


def test_min_tokens_needs_logit_edits_only_until_it_is_met():
    rig = Rig()
    rig.add(make_request(4, min_tokens=2, end_token_ids=[5000]))
    steps = [rig.send(), rig.send(), rig.send()]
    assert [s.descriptor.sampling.needs_logit_edits for s in steps] == [True, True, False]


def test_a_prompt_has_whole_steps_until_a_request_decodes():
    rig = Rig(max_num_mixed_tokens=8)
    rig.add(make_request(40))
    assert [q_lens(rig.send()) for _ in range(3)] == [[16], [16], [8]]
    rig.add(make_request(20, seed=1))
    assert [sorted(q_lens(rig.send())) for _ in range(4)] == [[1, 7], [1, 7], [1, 6], [1, 1]]


def test_many_decodes_leave_prompts_a_quarter_of_a_mixed_step():
    rig = Rig(max_num_mixed_tokens=8, max_num_seqs=10)
    rig.add(*(make_request(1, seed=seed) for seed in range(8)))
    rig.step()
    rig.add(make_request(20, seed=8))
    assert sorted(q_lens(rig.send())) == [1] * 8 + [2]
    # Each running request counts, also the one with the prompt.
    assert sorted(q_lens(rig.send())) == [1] * 8 + [3]


def test_steps_are_whole_again_while_many_prompts_wait():
    rig = Rig(max_num_mixed_tokens=2)
    rig.add(make_request(1, max_tokens=40))
    rig.step()
    rig.add(make_request(24, seed=1), make_request(28, seed=2))
    steps = [rig.send() for _ in range(5)]
    # Eight tokens, which are left after the third step, are few.
    assert [sorted(q_lens(step)) for step in steps] == [
        [1, 15],
        [1, 6, 9],
        [1, 1, 14],
        *2 * [[1] * 3],
    ]


def test_no_step_exceeds_the_limit_of_all_steps():
    rig = Rig(max_num_mixed_tokens=64, max_num_batched_tokens=6)
    rig.add(make_request(2), make_request(20, seed=1))
    assert [sorted(q_lens(rig.send())) for _ in range(2)] == [[2, 4], [1, 5]]


@pytest.mark.parametrize("depth", [1, 2])
def test_shorter_mixed_steps_change_no_token(depth):
    rig = Rig(max_num_mixed_tokens=3)
    requests = [make_request(5 + 3 * i, seed=i, max_tokens=9) for i in range(8)]
    rig.add(*requests)
    rig.run(depth=depth)
    for request in requests:
        assert request.sink.token_ids == expected_output(request.token_ids[:-9], request.sampling)
