"""Columns of decodes: steps and outputs are those of requests that are planned one by one."""

import gc
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.batch import read_int32, step_result
from services.engine.errors import RequestFaultError
from services.engine.request import FinishReason, RequestStatus
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig, end_token_after, q_lens


def started(*requests, **limits):
    """A rig whose requests have all sampled their first tokens."""
    rig = Rig(max_num_batched_tokens=64, **limits)
    rig.add(*requests)
    rig.step()
    return rig


def lengths(step):
    return read_int32(step.descriptor.attn_metadata.seq_lens).tolist()


def rows(step):
    return read_int32(step.descriptor.attn_metadata.row_ids).tolist()


def test_steps_with_the_same_decodes_count_on():
    requests = [make_request(length, max_tokens=9) for length in (2, 5)]
    rig = started(*requests)
    steps = [rig.send() for _ in range(3)]
    assert [lengths(step) for step in steps] == [[3, 6], [4, 7], [5, 8]]
    assert [rows(step) for step in steps] == [[request.row for request in requests]] * 3
    assert all(step.decodes.requests is steps[0].decodes.requests for step in steps)


def test_decodes_are_between_the_prompts_that_run_and_the_new_ones():
    decode, prompt, new = make_request(2), make_request(30, priority=1), make_request(1)
    rig = Rig(max_num_batched_tokens=16)
    rig.add(decode)
    rig.step()
    rig.add(prompt)
    rig.step()
    rig.add(new)
    step = rig.send()
    assert (q_lens(step), lengths(step)) == ([15, 1], [30, 4])
    step = rig.send()
    assert (q_lens(step), lengths(step)) == ([1, 1, 1], [31, 5, 1])
    assert rows(step) == [request.row for request in (prompt, decode, new)]
    assert step.requests == [prompt, decode, new]
    assert step.requests[step.decodes_at] == [prompt, decode]


def test_a_row_with_another_request_is_not_taken_for_the_one_before():
    first, second = make_request(2, max_tokens=30), make_request(2, max_tokens=30)
    rig = started(first, second)
    rig.step()
    rig.scheduler.abort(first)
    third = make_request(9, max_tokens=30)
    rig.add(third)
    rig.step()
    step = rig.send()
    assert sorted(zip(rows(step), lengths(step), strict=True)) == sorted(
        [(second.row, 5), (third.row, 10)]
    )


def test_requests_that_ended_before_the_cache_was_lost_are_not_kept():
    """An engine may sleep for hours before it plans another step."""
    decode, prompt = make_request(2, max_tokens=30), make_request(30)
    rig = Rig(max_num_batched_tokens=8, max_num_mixed_tokens=4)
    rig.add(decode)
    rig.step()
    rig.add(prompt)
    rig.step()
    for request in (decode, prompt):
        rig.scheduler.abort(request)
    rig.scheduler.drop_cache()
    kept = [weakref.ref(request.sink) for request in (decode, prompt)]
    del decode, prompt, request
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_one_faulty_token_ends_its_request_alone():
    requests = [make_request(2, max_tokens=9) for _ in range(3)]
    rig = started(*requests)
    step = rig.send()
    rig.in_flight.clear()
    outputs = list(rig.scheduler.update(step, step_result(step.step_id, [7, -1, 8])))
    by_request = {output.request: output for output in outputs}
    assert isinstance(by_request[requests[1]].error, RequestFaultError)
    assert [by_request[requests[index]].token_ids for index in (0, 2)] == [[7], [8]]
    assert requests[1].status is RequestStatus.FINISHED


def test_a_token_that_ends_one_request_is_like_any_other_for_the_rest():
    prompt = make_request(4).prompt_token_ids
    end = end_token_after(prompt, 3)
    ending = make_request(prompt, max_tokens=9, end_token_ids=[end])
    going_on = make_request(prompt, max_tokens=9)
    rig = started(ending, going_on)
    rig.run()
    assert ending.sink.outputs[-1].finish_reason is FinishReason.STOP
    assert len(ending.sink.token_ids) == 3
    assert going_on.sink.token_ids[:3] == ending.sink.token_ids
    assert len(going_on.sink.token_ids) == 9


def shown(step):
    """All of a step that does not depend on the order of its requests."""
    descriptor, attention = step.descriptor, step.descriptor.attn_metadata
    sampling = {rows(step)[i] for i in read_int32(descriptor.sampling.sample_indices).tolist()}
    updates, blocks, start = attention.block_table_updates, {}, 0
    entries = zip(*map(read_int32, (updates.rows, updates.offsets, updates.counts)), strict=True)
    for row, offset, count in entries:
        blocks[int(row), int(offset)] = read_int32(updates.block_ids)[start:][:count].tolist()
        start += count
    return (
        dict(zip(rows(step), zip(q_lens(step), lengths(step), strict=True), strict=True)),
        sampling,
        blocks,
        descriptor.sampling.all_greedy,
        descriptor.sampling.needs_logit_edits,
        attention.max_seqlen_k,
        descriptor.context,
    )


class Pair:
    """Two schedulers with the same requests, of which one plans each request by itself.

    It does so because their log-probabilities are wanted.
    """

    def __init__(self, **limits):
        self.rigs = [Rig(**limits) for _ in range(2)]
        self.requests = []

    def submit(self, length, **sampling):
        first = make_request(length, **sampling)
        second = make_request(first.prompt_token_ids, logprobs=0, **sampling)
        second.arrival_s = first.arrival_s
        self.requests.append((first, second))
        for rig, request in zip(self.rigs, self.requests[-1], strict=True):
            rig.add(request)

    def send(self):
        steps = [rig.scheduler.schedule() for rig in self.rigs]
        if steps[0] is None:
            assert steps[1] is None
            return False
        assert shown(steps[0]) == shown(steps[1])
        assert steps[1].decodes is None
        for rig, step in zip(self.rigs, steps, strict=True):
            rig.in_flight.append(step)
        return True

    def receive(self):
        outputs = [
            {
                next(i for i, pair in enumerate(self.requests) if output.request in pair): (
                    output.token_ids,
                    output.finish_reason,
                    output.stop_token_id,
                )
                for output in rig.receive()
            }
            for rig in self.rigs
        ]
        assert outputs[0] == outputs[1]

    def abort(self, index):
        for rig, request in zip(self.rigs, self.requests[index % len(self.requests)], strict=True):
            rig.scheduler.abort(request)

    def check(self):
        for first, second in self.requests:
            for name in ("token_ids", "num_computed_tokens", "num_pending_tokens", "block_ids"):
                assert getattr(first, name) == getattr(second, name), name
            assert first.status is second.status


@settings(max_examples=150)
@given(
    num_blocks=st.sampled_from([9, 14, 60]),
    orders=st.lists(
        st.one_of(
            st.tuples(
                st.just("submit"),
                st.integers(1, 20),
                st.integers(1, 30),
                st.sampled_from([0, 3]),
                st.sampled_from([7, 1000]),
                st.sampled_from([0.0, 1.0]),
            ),
            st.tuples(st.just("abort"), st.integers(0, 9)),
            *[st.just(("send",)), st.just(("receive",))] * 3,
        ),
        max_size=60,
    ),
)
def test_columns_of_decodes_are_what_planning_them_one_by_one_makes(num_blocks, orders):
    pair = Pair(num_blocks=num_blocks, max_num_batched_tokens=12, max_num_seqs=4)
    for order, *values in orders:
        if order == "submit" and pair.rigs[0].scheduler.num_waiting < 8:
            length, max_tokens, min_tokens, end_every, temperature = values
            pair.submit(
                length,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                end_token_ids=range(0, 1000, end_every),
                temperature=temperature,
            )
        elif order == "abort" and pair.requests:
            pair.abort(values[0])
        elif order == "send" and len(pair.rigs[0].in_flight) < 3:
            pair.send()
        elif order == "receive" and pair.rigs[0].in_flight:
            pair.receive()
        pair.check()
    while pair.send() or pair.rigs[0].in_flight:
        pair.receive()
        pair.check()
