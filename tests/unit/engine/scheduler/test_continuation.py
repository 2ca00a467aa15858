"""Next tokens of running requests, and preemption where blocks run out."""

from services.engine.batch import read_int32
from services.engine.request import FinishReason, RequestStatus
from tests.support.fake_worker import expected_output
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig, end_token_after, q_lens


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
