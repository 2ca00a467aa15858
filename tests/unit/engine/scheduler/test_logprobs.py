"""Log-probabilities of prompts come chunk by chunk, each position once."""

from services.engine.scheduler.planned_step import MAX_PROMPT_LOGPROBS
from tests.support.fake_worker import prompt_logprob
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig


def told(request):
    return [entry for output in request.sink.outputs for entry in output.prompt_logprobs]


def test_each_prompt_token_but_the_first_is_reported_once_before_or_with_the_first_output_token():
    rig = Rig(max_num_batched_tokens=5)
    request = make_request(list(range(18)), prompt_logprobs=2)
    rig.add(request)
    rig.run()
    assert [entry.logprob for entry in told(request)] == [prompt_logprob(t) for t in range(1, 18)]
    assert [entry.top_token_ids[0] for entry in told(request)] == list(range(1, 18))
    assert all(len(entry.top_logprobs) == 2 for entry in told(request))
    first = next(i for i, out in enumerate(request.sink.outputs) if out.token_ids)
    assert not any(out.prompt_logprobs for out in request.sink.outputs[first + 1 :])


def test_cached_blocks_are_not_used_for_it_but_what_it_computes_is_cached():
    rig = Rig()
    prompt = list(range(12))
    rig.add(make_request(prompt, max_tokens=1))
    rig.run()
    asking = make_request(prompt, prompt_logprobs=0, max_tokens=1)
    rig.add(asking)
    rig.run()
    assert asking.num_cached_tokens == 0
    assert len(told(asking)) == 11
    after = make_request(prompt, max_tokens=1)
    rig.add(after)
    rig.run()
    assert after.num_cached_tokens == 8


def test_a_request_that_is_preempted_in_its_prompt_receives_nothing_twice():
    rig = Rig(num_blocks=7, max_num_batched_tokens=6)
    first = make_request(6, max_tokens=18)
    asking = make_request(list(range(500, 512)), prompt_logprobs=1, max_tokens=4)
    rig.add(first)
    for _ in range(3):
        rig.step()
    rig.add(asking)
    rig.run()
    assert rig.scheduler.counts.num_preemptions
    assert [entry.logprob for entry in told(asking)] == [prompt_logprob(t) for t in range(501, 512)]


def test_a_prompt_of_one_token_has_no_log_probabilities():
    rig = Rig()
    request = make_request([7], prompt_logprobs=5, max_tokens=2)
    rig.add(request)
    rig.run()
    assert told(request) == []


def test_a_step_brings_no_more_of_them_than_the_event_loop_can_convert_in_time():
    """2048 prompt tokens with 20 each were 43,000 in one step, which took 0.4 s to convert."""
    rig = Rig(max_model_len=900, max_num_batched_tokens=900, num_blocks=700)
    prompts = [range(100, 800), range(700)]
    asking = [make_request(list(prompt), prompt_logprobs=20, max_tokens=1) for prompt in prompts]
    rig.add(*asking)
    while rig.scheduler.has_work:
        outputs = rig.step()
        brought = sum(len(e.top_logprobs) + 1 for out in outputs for e in out.prompt_logprobs)
        assert brought <= MAX_PROMPT_LOGPROBS + 21
    for request, prompt in zip(asking, prompts, strict=True):
        entries = [entry.logprob for entry in told(request)]
        assert entries == [prompt_logprob(token_id) for token_id in prompt[1:]]
