"""Each of the scheduler's rules on its own; test_scheduler_machine.py has them all at once."""

from itertools import pairwise

import pytest

from services.engine.batch import read_int32
from services.engine.errors import InvalidRequestError, QueueFullError
from services.engine.request import FinishReason, RequestStatus
from services.engine.scheduler.scheduler import ScheduledStep
from tests.support.fake_worker import FakeWorker, expected_output
from tests.support.requests import make_request, make_sampling
from tests.support.scheduler_rig import BLOCK_SIZE, Rig


def q_lens(step: ScheduledStep) -> list[int]:
    bounds = read_int32(step.descriptor.attn_metadata.query_start_loc).tolist()
    return [end - start for start, end in pairwise(bounds)]


def end_token_after(prompt: list[int], num_output: int) -> int:
    """The token that comes at this place of the output, to make it an end token."""
    return expected_output(prompt, make_sampling(max_tokens=num_output))[-1]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_get_what_they_would_get_alone(depth):
    rig = Rig()
    requests = [make_request(5 + i, seed=i, max_tokens=9) for i in range(8)]
    rig.add(*requests)
    rig.run(depth=depth)
    for request in requests:
        assert request.sink.token_ids == expected_output(request.token_ids[:-9], request.sampling)
        assert request.sink.outputs[-1].finish_reason is FinishReason.LENGTH


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


def test_long_prompts_are_computed_in_chunks_and_sample_once():
    rig = Rig(max_num_batched_tokens=6)
    rig.add(make_request(14))
    steps = [rig.send(), rig.send(), rig.send()]
    assert [q_lens(step) for step in steps] == [[6], [6], [2]]
    assert [len(step.requests) for step in steps] == [0, 0, 1]


def test_decodes_come_before_prompts_and_prompts_take_what_is_left():
    rig = Rig(max_num_batched_tokens=8)
    rig.add(make_request(4))
    rig.step()
    rig.add(make_request(20))
    step = rig.send()
    assert q_lens(step) == [1, 7]
    assert step.descriptor.context.is_prefill


def test_a_prompt_being_computed_leaves_a_token_for_each_later_request():
    rig = Rig(max_num_batched_tokens=8)
    urgent = make_request(30, priority=1)
    rig.add(make_request(3), make_request(3))
    rig.step()
    rig.add(urgent)
    rig.step()
    assert q_lens(rig.send()) == [6, 1, 1]


def test_no_more_requests_run_than_there_are_rows_or_tokens():
    by_rows, by_tokens = Rig(max_num_seqs=2), Rig(max_num_batched_tokens=3)
    for rig, most in ((by_rows, 2), (by_tokens, 3)):
        rig.add(*(make_request(1) for _ in range(4)))
        for _ in range(3):
            rig.step()
        assert rig.scheduler.num_running == most


def test_a_decode_is_scheduled_before_its_last_token_is_known():
    rig = Rig()
    rig.add(make_request(4))
    rig.send()
    second = rig.send()
    assert q_lens(second) == [1]
    assert read_int32(second.descriptor.attn_metadata.seq_lens).tolist() == [5]


def test_a_steady_decode_step_carries_no_tokens_and_no_blocks():
    rig = Rig()
    rig.add(make_request(5))
    rig.step()
    descriptor = rig.send().descriptor
    assert not descriptor.row_assignments
    assert not descriptor.attn_metadata.HasField("block_table_updates")
    assert not descriptor.context.is_prefill


def test_nothing_is_scheduled_past_the_last_token():
    rig = Rig()
    rig.add(make_request(4, max_tokens=2))
    rig.send()
    rig.send()
    assert rig.scheduler.schedule() is None
    rig.receive()
    (last,) = rig.receive()
    assert last.finish_reason is FinishReason.LENGTH


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


def test_the_youngest_of_the_lowest_priority_is_preempted_first():
    rig = Rig(num_blocks=7, max_num_batched_tokens=32)
    old, young, urgent = make_request(8), make_request(8), make_request(8, priority=1)
    rig.add(old, young, urgent)
    rig.step()
    rig.step()
    while rig.scheduler.counts.num_preemptions == 0:
        rig.step()
    assert young.status is RequestStatus.WAITING
    assert old.status is RequestStatus.RUNNING
    assert urgent.status is RequestStatus.RUNNING


def test_a_request_may_be_the_one_that_is_preempted_for_itself():
    rig = Rig(num_blocks=6, max_num_batched_tokens=32)
    first, second = make_request(9, max_tokens=8), make_request(8, max_tokens=8)
    rig.add(first, second)
    rig.step()  # three blocks and two; the second crosses into a third one first
    rig.step()
    assert second.status is RequestStatus.WAITING
    assert second.block_ids == []
    assert second.row is None
    assert first.status is RequestStatus.RUNNING


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


def test_a_preempted_request_still_takes_its_pending_token_and_starts_over_with_it():
    rig = Rig(num_blocks=6, max_num_batched_tokens=32, enable_prefix_caching=False)
    first, second = make_request(9, max_tokens=3), make_request(8, max_tokens=4)
    rig.add(first, second)
    rig.send()
    rig.send()
    assert second.status is RequestStatus.WAITING
    assert second.num_pending_tokens == 1
    rig.receive()
    assert second.num_pending_tokens == 0
    assert second.num_output_tokens == 1
    rig.run()
    assert second.sink.token_ids == expected_output(second.prompt_token_ids, second.sampling)


def test_a_preempted_request_may_end_while_it_waits():
    rig = Rig(num_blocks=6, max_num_batched_tokens=32)
    prompt = make_request(8).prompt_token_ids
    second = make_request(prompt, end_token_ids=[end_token_after(prompt, 1)])
    rig.add(make_request(9), second)
    rig.send()
    rig.send()
    assert second.status is RequestStatus.WAITING
    rig.receive()
    assert second.status is RequestStatus.FINISHED
    assert rig.scheduler.num_waiting == 0


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


def num_drafts(step: ScheduledStep) -> list[int]:
    return read_int32(step.descriptor.spec_decode_metadata.num_draft_tokens).tolist()


class TestDrafts:
    def test_a_step_verifies_what_the_last_one_guessed(self):
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

    def test_without_speculation_descriptors_know_nothing_of_it(self):
        rig = Rig()
        rig.add(make_request(5))
        for _ in range(3):
            assert not rig.send().descriptor.HasField("spec_decode_metadata")

    def test_output_is_cut_where_it_ends(self):
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

    def test_each_accepted_token_has_its_log_probabilities(self):
        rig = Rig(num_speculative_tokens=3)
        request = make_request(5, max_tokens=13, logprobs=2)
        rig.add(request, make_request(5, max_tokens=13))
        rig.run()
        for output in request.sink.outputs:
            assert [p.top_token_ids[0] for p in output.logprobs] == output.token_ids

    def test_a_small_budget_cuts_drafts_and_leaves_each_request_a_token(self):
        rig = Rig(num_speculative_tokens=3, max_num_batched_tokens=6)
        rig.add(*(make_request(1, max_tokens=30) for _ in range(4)))
        rig.step()
        step = rig.send()
        assert (q_lens(step), num_drafts(step)) == ([3, 1, 1, 1], [2, 0, 0, 0])

    def test_a_preempted_request_starts_over_without_drafts(self):
        rig = Rig(num_speculative_tokens=3, num_blocks=8)
        requests = [make_request(8, max_tokens=18) for _ in range(2)]
        rig.add(*requests)
        rig.run()
        assert rig.scheduler.counts.num_preemptions > 0
        for request in requests:
            prompt = request.prompt_token_ids
            assert request.sink.token_ids == expected_output(prompt, request.sampling)

    def test_blocks_are_shared_once_their_tokens_are_final(self):
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
