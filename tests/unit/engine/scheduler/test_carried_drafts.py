"""Steps that are ordered before the result of the step that made their drafts."""

from dataclasses import replace

import pytest

from services.engine.batch import StepFailure, read_int32
from services.engine.request import FinishReason, RequestStatus
from services.engine.scheduler.scheduler import ScheduledStep
from tests.support.fake_worker import VOCAB_SIZE, expected_output
from tests.support.requests import make_request, make_sampling
from tests.support.scheduler_rig import BLOCK_SIZE, Rig, end_token_after, num_drafts, q_lens
from tests.support.token_masks import ManualConstraint


def carried(step: ScheduledStep) -> list[int]:
    return read_int32(step.descriptor.spec_decode_metadata.carried_requests).tolist()


def seq_lens(step: ScheduledStep) -> list[int]:
    return read_int32(step.descriptor.attn_metadata.seq_lens).tolist()


def check(*requests) -> None:
    for request in requests:
        prompt = request.prompt_token_ids
        assert request.sink.token_ids == expected_output(prompt, request.sampling)


def test_the_next_step_is_ordered_for_the_most_tokens_that_may_come():
    rig = Rig(num_speculative_tokens=3)
    rig.add(make_request(5))
    rig.send()
    first = rig.send()
    # A prompt brings one token; its three drafts follow it.
    assert (q_lens(first), num_drafts(first), carried(first)) == ([4], [3], [0])
    assert seq_lens(first) == [5 + 1 + 3]
    assert not first.descriptor.spec_decode_metadata.draft_token_ids
    rig.receive()
    second = rig.send()
    assert (q_lens(second), carried(second)) == ([4], [0])
    assert seq_lens(second) == [5 + 1 + 4 + 3]


def test_a_result_completes_the_order_of_its_step():
    rig = Rig(num_speculative_tokens=3)
    request = make_request(5, max_tokens=30)
    rig.add(request)
    rig.send()
    rig.send()
    rig.receive()
    drafts = request.draft_token_ids
    step = rig.in_flight[0]
    rig.receive()
    metadata = step.descriptor.spec_decode_metadata
    assert read_int32(metadata.draft_token_ids).tolist() == drafts
    assert (carried(step), seq_lens(step)) == ([], [5 + 1 + 3])


def test_blocks_suffice_for_the_most_tokens_and_stay():
    rig = Rig(num_speculative_tokens=3)
    request = make_request(5, max_tokens=30)
    rig.add(request)
    for _ in range(2):
        rig.send()
    # 5 + 1 + 3 tokens of the second step, and 2 that drafting writes after it.
    assert len(request.block_ids) == -(-11 // BLOCK_SIZE)
    rig.receive()
    rig.send()
    assert len(request.block_ids) == -(-(11 + 4) // BLOCK_SIZE)
    held = list(request.block_ids)
    rig.receive()
    assert request.block_ids == held


def test_prompts_and_new_requests_join_carried_ones():
    rig = Rig(num_speculative_tokens=2, max_num_batched_tokens=8)
    rig.add(make_request(4), make_request(12))
    assert q_lens(rig.send()) == [4, 4]
    second = rig.send()
    assert (q_lens(second), carried(second)) == ([3, 5], [0])
    rig.add(make_request(3))
    rig.receive()
    third = rig.send()
    assert (q_lens(third), carried(third)) == ([3, 3, 2], [0])
    rig.run()


def test_a_request_that_ends_in_flight_wastes_its_next_step_alone():
    rig = Rig(num_speculative_tokens=3)
    prompt = list(range(6))
    stopped = make_request(prompt, max_tokens=30, end_token_ids=[end_token_after(prompt, 9)])
    other = make_request(7, max_tokens=30)
    rig.add(stopped, other)
    while stopped.status is not RequestStatus.FINISHED:
        if len(rig.in_flight) < 2:
            rig.send()
        else:
            rig.receive()
    assert rig.in_flight[0].requests == [stopped, other]
    [output] = rig.receive()
    assert output.request is other
    rig.run()
    check(stopped, other)
    assert stopped.sink.outputs[-1].finish_reason is FinishReason.STOP


def test_a_request_whose_last_token_is_pending_is_not_ordered_again():
    rig = Rig(num_speculative_tokens=3)
    rig.add(make_request(5, max_tokens=1), make_request(5, max_tokens=8))
    rig.send()
    assert q_lens(rig.send()) == [4]


def test_an_aborted_request_gives_its_blocks_back_with_two_steps_in_flight():
    rig = Rig(num_speculative_tokens=3)
    aborted, other = make_request(9, max_tokens=30), make_request(7, max_tokens=20)
    rig.add(aborted, other)
    for _ in range(2):
        rig.send()
    assert rig.scheduler.abort(aborted)
    rig.run()
    check(other)
    assert rig.scheduler.num_free_blocks == 32


def test_a_request_is_preempted_while_its_drafts_are_in_flight():
    rig = Rig(num_speculative_tokens=3, num_blocks=9)
    requests = [make_request(8, max_tokens=20) for _ in range(3)]
    rig.add(*requests)
    rig.run()
    assert rig.scheduler.counts.num_preemptions > 0
    check(*requests)


def test_near_the_end_of_the_context_all_wait_for_results():
    rig = Rig(num_speculative_tokens=3, max_model_len=16)
    request, other = make_request(5, max_tokens=30), make_request(2, max_tokens=30)
    rig.add(request, other)
    num_alone = 0
    while rig.scheduler.has_work or rig.in_flight:
        step = rig.scheduler.schedule() if len(rig.in_flight) < 2 else None
        if step is not None:
            rig.in_flight.append(step)
            continue
        num_alone += len(rig.in_flight) == 1
        rig.receive()
    assert num_alone
    for each in (request, other):
        room = 16 - each.num_prompt_tokens
        sampling = make_sampling(max_tokens=30)
        expected = expected_output(each.prompt_token_ids, sampling, max_output=room)
        assert each.sink.token_ids == expected


def test_beside_a_grammar_all_wait_for_results():
    rig = Rig(num_speculative_tokens=3)
    constrained = make_request(3, max_tokens=2)
    constrained.constraint = ManualConstraint(
        lambda output: [len(output), 500], vocab_size=VOCAB_SIZE, is_instant=True
    )
    rig.add(make_request(5, max_tokens=30), constrained)
    rig.send()
    assert rig.scheduler.schedule() is None
    rig.receive()
    assert num_drafts(rig.send()) == [3, 0]
    # Its last token is pending, so the other one does not wait for it.
    assert num_drafts(rig.send()) == [3]


def test_looked_up_drafts_are_known_when_their_step_is_ordered():
    rig = Rig(num_speculative_tokens=2, lookup_sizes=(1, 2))
    rig.add(make_request(5))
    rig.send()
    rig.add(make_request(6))
    assert rig.scheduler.schedule() is None


def test_a_request_that_wants_fewer_drafts_is_carried_with_as_many():
    rig = Rig(num_speculative_tokens=3)
    rig.add(make_request(5, num_speculative_tokens=1), make_request(5, num_speculative_tokens=0))
    rig.send()
    step = rig.send()
    assert (q_lens(step), num_drafts(step), carried(step)) == ([2, 1], [1, 0], [0, 1])
    rig.run()


def test_a_number_of_drafts_holds_for_the_step_after_the_one_that_makes_them():
    rig = Rig(num_speculative_tokens=3, min_speculative_tokens=0)
    numbers = iter([2, 0, 3, 1])

    class Turns:
        def choose(self, num_requests, *, most):
            return next(numbers)

    rig.scheduler._drafts = replace(rig.scheduler._drafts, length=Turns())
    rig.add(make_request(5))
    rig.send()
    assert num_drafts(rig.send()) == [2]


@pytest.mark.parametrize("penalty", [{"min_tokens": 6, "end_token_ids": range(0, 1000, 2)}, {}])
def test_min_tokens_hold_while_the_number_of_tokens_is_unknown(penalty):
    rig = Rig(num_speculative_tokens=3)
    request = make_request(5, max_tokens=20, **penalty)
    rig.add(request)
    rig.run()
    check(request)


def test_only_tokens_that_hold_are_found_as_a_prefix():
    rig = Rig(num_speculative_tokens=3)
    first = make_request(list(range(6)), max_tokens=14)
    rig.add(first)
    for _ in range(2):
        rig.send()
    rig.receive()
    rig.send()
    # Two steps are in flight, of which the first computes the newest known token.
    rig.scheduler.abort(first)
    second = make_request([*first.token_ids, *range(900, 905)], max_tokens=4)
    rig.add(second)
    rig.run()
    assert second.num_cached_tokens == len(first.token_ids) // BLOCK_SIZE * BLOCK_SIZE
    check(second)


@pytest.mark.parametrize("num_sent", [1, 2])
def test_a_step_without_memory_is_taken_back_with_the_carried_one(num_sent):
    rig = Rig(num_speculative_tokens=3)
    request, other = make_request(6, max_tokens=20), make_request(6, max_tokens=20)
    rig.add(request, other)
    rig.step()
    rig.step()
    for _ in range(num_sent):
        rig.send()
    known = len(request.token_ids)
    rig.worker.memory_tokens = 1
    failed = rig.in_flight.popleft()
    assert rig.worker.execute(failed.descriptor).failure == StepFailure.STEP_FAILURE_OUT_OF_MEMORY
    rig.scheduler.retreat([failed, *rig.in_flight])
    for step in rig.in_flight:
        assert rig.worker.execute(step.descriptor).failure == StepFailure.STEP_FAILURE_SKIPPED
    rig.in_flight.clear()
    rig.worker.memory_tokens = 2**31
    assert (request.num_pending_tokens, request.num_pending_drafts) == (0, 0)
    assert len(request.token_ids) == known
    rig.run()
    check(request, other)
