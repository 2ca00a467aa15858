"""Steps with drafts, each after the result of the one that made them."""

from collections import Counter

import pytest

from services.engine.batch import read_int32
from services.engine.config.engine_config import EngineConfig
from services.engine.request import FinishReason
from tests.support.fake_worker import VOCAB_SIZE, expected_output
from tests.support.requests import make_request
from tests.support.scheduler_rig import BLOCK_SIZE, Rig, end_token_after, num_drafts, q_lens
from tests.support.token_masks import ManualConstraint


def with_grammar(prompt, **sampling):
    request = make_request(prompt, **sampling)
    request.constraint = ManualConstraint(
        lambda output: [len(output)], vocab_size=VOCAB_SIZE, is_instant=True
    )
    return request


def numbers_made(rig: Rig, *requests) -> list[int]:
    """Serves requests; returns how many drafts each step after the first makes."""
    rig.add(*requests)
    rig.step()
    made = []
    while rig.scheduler.has_work:
        made.append(rig.send().descriptor.spec_decode_metadata.num_next_drafts)
        rig.receive()
    return made


def test_a_step_verifies_what_the_last_one_guessed():
    rig = Rig(num_speculative_tokens=3)
    rig.add(make_request(5))
    assert (q_lens(rig.send()), num_drafts(rig.in_flight[0])) == ([5], [0])
    rig.receive()
    drafted = rig.scheduler.running[0].draft_token_ids
    step = rig.send()
    metadata = step.descriptor.spec_decode_metadata
    assert (q_lens(step), num_drafts(step), metadata.num_spec_steps) == ([4], [3], 3)
    assert read_int32(metadata.draft_token_ids).tolist() == drafted
    assert not step.descriptor.context.is_prefill


def test_without_speculation_descriptors_know_nothing_of_it():
    rig = Rig()
    rig.add(make_request(5))
    for _ in range(3):
        assert not rig.send().descriptor.HasField("spec_decode_metadata")


def test_output_is_cut_where_it_ends():
    rig = Rig(num_speculative_tokens=3)
    prompt = list(range(6))
    stop = end_token_after(prompt, 9)
    stopped = make_request(prompt, max_tokens=30, end_token_ids=[stop])
    limited = make_request(prompt, max_tokens=7)
    rig.add(stopped, limited)
    rig.run()
    for request, reason in ((stopped, FinishReason.STOP), (limited, FinishReason.LENGTH)):
        assert request.sink.token_ids == expected_output(prompt, request.sampling)
        assert request.sink.outputs[-1].finish_reason is reason
    assert len(limited.sink.outputs) < len(limited.sink.token_ids)
    assert rig.scheduler.counts.output_tokens == sum(
        len(request.sink.token_ids) for request in (stopped, limited)
    )


def test_each_accepted_token_has_its_log_probabilities():
    rig = Rig(num_speculative_tokens=3)
    request = make_request(5, max_tokens=13, logprobs=2)
    rig.add(request, make_request(5, max_tokens=13))
    rig.run()
    for output in request.sink.outputs:
        assert [p.top_token_ids[0] for p in output.logprobs] == output.token_ids


@pytest.mark.parametrize(
    ("flags", "budget", "num_without"),
    [
        ({}, 512 * 5 + 256, 0),
        ({"max_num_batched_tokens": 2048}, 2048, 128),
        ({"max_num_seqs": 256}, 2048, 0),
    ],
)
def test_by_default_all_requests_verify_all_drafts_in_one_step(flags, budget, num_without):
    config = EngineConfig.from_flags(num_speculative_tokens=4, **flags)
    assert config.max_num_batched_tokens == budget
    num_requests = config.scheduler.max_num_seqs
    rig = Rig(
        num_blocks=5000, max_num_seqs=num_requests, max_num_waiting=num_requests,
        max_num_batched_tokens=budget, num_speculative_tokens=4,
    )  # fmt: skip
    rig.add(*(make_request(1, max_tokens=30) for _ in range(num_requests)))
    rig.step()
    assert Counter(q_lens(rig.send())) == Counter({5: num_requests - num_without, 1: num_without})
    # Without drafts the default does not depend on the number of requests.
    assert EngineConfig.from_flags(max_num_seqs=4096).max_num_batched_tokens == 2048


def test_a_small_budget_cuts_drafts_and_leaves_each_request_a_token():
    rig = Rig(num_speculative_tokens=3, max_num_batched_tokens=6)
    rig.add(*(make_request(1, max_tokens=30) for _ in range(4)))
    rig.step()
    step = rig.send()
    assert (q_lens(step), num_drafts(step)) == ([3, 1, 1, 1], [2, 0, 0, 0])


def test_a_preempted_request_starts_over_without_drafts():
    rig = Rig(num_speculative_tokens=3, num_blocks=8)
    requests = [make_request(8, max_tokens=18) for _ in range(2)]
    rig.add(*requests)
    rig.run()
    assert rig.scheduler.counts.num_preemptions > 0
    for request in requests:
        prompt = request.prompt_token_ids
        assert request.sink.token_ids == expected_output(prompt, request.sampling)


def test_blocks_are_shared_once_their_tokens_are_final():
    rig = Rig(num_speculative_tokens=3)
    first = make_request(list(range(6)), max_tokens=14)
    rig.add(first)
    rig.run()
    second = make_request(first.token_ids, max_tokens=14)
    rig.add(second)
    rig.run()
    # Of 20 tokens the last was never computed, so four blocks are full.
    assert second.num_cached_tokens == 4 * BLOCK_SIZE
    assert second.sink.token_ids == expected_output(first.token_ids, second.sampling)


@pytest.mark.parametrize(
    ("make", "sampling"), [(make_request, {"num_speculative_tokens": 0}), (with_grammar, {})]
)
def test_no_draft_is_made_that_no_request_verifies(make, sampling):
    rig = Rig(num_speculative_tokens=3, min_speculative_tokens=0)
    assert set(numbers_made(rig, make(3, max_tokens=30, **sampling))) == {0}


def test_no_more_drafts_are_made_than_a_request_wants():
    rig = Rig(num_speculative_tokens=3, min_speculative_tokens=0)
    made = numbers_made(rig, make_request(3, max_tokens=40, num_speculative_tokens=1))
    assert set(made) == {0, 1}  # both are timed


def test_drafts_are_made_for_those_that_verify_them():
    rig = Rig(num_speculative_tokens=3, min_speculative_tokens=0)
    made = numbers_made(rig, with_grammar(3, max_tokens=6), make_request(4, max_tokens=30))
    assert max(made) == 3


def test_a_fixed_number_of_drafts_is_always_made():
    rig = Rig(num_speculative_tokens=3, min_speculative_tokens=3)
    assert set(numbers_made(rig, make_request(3, num_speculative_tokens=0))) == {3}
