"""Building and reading the messages between scheduler and worker."""

import numpy as np
import pytest

from services.engine.batch import (
    BatchBuilder,
    BatchDescriptor,
    FallbackReason,
    GraphKey,
    GraphKind,
    pack_float32,
    pack_int32,
    read_float32,
    read_int32,
    row_assignment,
    step_result,
)
from services.engine.core.redaction import redacted
from services.engine.request import PositionLogprobs
from services.engine.scheduler.logprobs import read_logprobs
from tests.support.fake_worker import FakeWorker, WorkerViolationError, expected_output
from tests.support.requests import make_sampling

PROMPT = [11, 12, 13, 14, 15]
SAMPLING = make_sampling(max_tokens=4, seed=2**64 - 1)


def build(batch: BatchBuilder, *, step_id: int = 1, graph_key: GraphKey | None = None):
    return batch.build(
        step_id=step_id,
        is_prefill=True,
        graph_key=graph_key,
        fallback_reason=FallbackReason.FALLBACK_REASON_UNSUPPORTED,
    )


def prefill(block_ids: list[int], row: int = 1) -> BatchBuilder:
    """One request that computes its whole prompt in a row."""
    batch = BatchBuilder()
    batch.row_assignments.append(
        row_assignment(row=row, token_ids=PROMPT, num_prompt_tokens=5, sampling=SAMPLING)
    )
    batch.update_blocks(row, 0, block_ids)
    batch.row_ids.append(row)
    batch.q_lens.append(5)
    batch.seq_lens.append(5)
    batch.sample_indices.append(0)
    return batch


def fake_worker() -> FakeWorker:
    return FakeWorker(max_num_seqs=2, max_model_len=16, num_blocks=5, block_size=4)


def test_integers_travel_as_little_endian_bytes_and_are_viewed_read_only():
    data = pack_int32([1, -2, 2**31 - 1])
    assert data[:4] == b"\x01\x00\x00\x00"
    view = read_int32(data)
    assert view.tolist() == [1, -2, 2**31 - 1]
    assert not view.flags.writeable


def test_floats_survive_packing():
    assert read_float32(pack_float32([0.5, -1.25])).tolist() == [0.5, -1.25]


def test_an_array_of_two_dimensions_is_packed_row_after_row():
    assert read_int32(pack_int32(np.array([[1, 2], [3, 4]]).T)).tolist() == [1, 3, 2, 4]


def test_a_descriptor_holds_the_columns_that_were_gathered():
    batch = prefill([3, 4])
    batch.row_ids.append(0)
    batch.q_lens.append(1)
    batch.seq_lens.append(9)
    descriptor = BatchDescriptor.FromString(build(batch).SerializeToString())
    attention, context = descriptor.attn_metadata, descriptor.context
    assert read_int32(attention.query_start_loc).tolist() == [0, 5, 6]
    assert read_int32(attention.seq_lens).tolist() == [5, 9]
    assert read_int32(attention.row_ids).tolist() == [1, 0]
    assert (attention.max_seqlen_q, attention.max_seqlen_k) == (5, 9)
    assert (context.batch_size, context.num_tokens) == (2, 6)
    assert read_int32(attention.block_table_updates.block_ids).tolist() == [3, 4]
    assert not descriptor.HasField("graph_key")


def test_a_step_without_block_changes_carries_no_updates():
    batch = BatchBuilder()
    batch.row_ids.append(0)
    batch.q_lens.append(1)
    batch.seq_lens.append(9)
    assert not build(batch).attn_metadata.HasField("block_table_updates")


def test_a_graph_is_ordered_by_its_key():
    key = GraphKey(num_tokens=8, graph_bs=8, max_q_len=1, kind=GraphKind.GRAPH_KIND_DECODE)
    assert build(prefill([3, 4]), graph_key=key).graph_key == key


def test_a_row_assignment_fills_in_every_default():
    sampling = make_sampling(
        max_tokens=9, min_tokens=2, end_token_ids=[7, 3], logit_bias=((5, 1.5),), logprobs=0
    )
    row = row_assignment(row=3, token_ids=PROMPT, num_prompt_tokens=4, sampling=sampling)
    assert read_int32(row.token_ids).tolist() == PROMPT
    assert read_int32(row.sampling.end_token_ids).tolist() == [3, 7]
    assert read_int32(row.sampling.bias_token_ids).tolist() == [5]
    assert read_float32(row.sampling.bias_values).tolist() == [1.5]
    assert (row.sampling.top_p, row.sampling.num_logprobs) == (1.0, 0)


def test_no_wish_for_log_probabilities_travels_as_minus_one():
    row = row_assignment(row=0, token_ids=PROMPT, num_prompt_tokens=5, sampling=SAMPLING)
    assert row.sampling.num_logprobs == -1
    assert row.sampling.seed == 2**64 - 1


def test_each_request_gets_as_many_log_probabilities_as_it_wanted():
    result = step_result(
        1,
        [4, 5, 6],
        logprobs=[-1, -2, -3],
        top_token_ids=[[4, 1], [5, 2], [6, 3]],
        top_logprobs=[[-1, -4], [-2, -5], [-3, -6]],
    )
    assert list(read_logprobs(result, [(range(1), 0), (range(1, 3), 2)])) == [
        [PositionLogprobs(-1.0, (), ())],
        [
            PositionLogprobs(-2.0, (5, 2), (-2.0, -5.0)),
            PositionLogprobs(-3.0, (6, 3), (-3.0, -6.0)),
        ],
    ]


def test_log_probabilities_of_chosen_tokens_alone_need_no_top_columns():
    result = step_result(1, [4], logprobs=[-1])
    assert list(read_logprobs(result, [(range(1), 0)])) == [[PositionLogprobs(-1.0, (), ())]]


def test_a_redacted_step_names_no_token_and_leaves_the_original_alone():
    descriptor = build(prefill([3, 4]))
    result = step_result(
        1, [4], logprobs=[-1], top_token_ids=[[4]], top_logprobs=[[-1]], elapsed_us=5
    )
    shown, shown_result = redacted(descriptor, result)
    assert not shown.row_assignments[0].token_ids
    assert not shown_result.token_ids
    assert not shown_result.top_token_ids
    assert shown_result.elapsed_us == 5
    assert shown.attn_metadata == descriptor.attn_metadata
    assert read_int32(descriptor.row_assignments[0].token_ids).tolist() == PROMPT
    assert read_int32(result.token_ids).tolist() == [4]


def test_the_fake_worker_answers_with_the_token_that_the_prompt_dictates():
    result = fake_worker().execute(build(prefill([3, 4])))
    assert read_int32(result.token_ids).tolist() == expected_output(PROMPT, SAMPLING)[:1]


@pytest.mark.parametrize(
    ("block_ids", "complaint"),
    [([3], "null block"), ([3, 0], "null block"), ([3, 5], "does not exist"), ([3, 3], "foreign")],
)
def test_the_fake_worker_notices_wrong_blocks(block_ids, complaint):
    with pytest.raises(WorkerViolationError, match=complaint):
        fake_worker().execute(build(prefill(block_ids)))


def test_the_fake_worker_notices_a_block_that_was_overwritten():
    worker = fake_worker()
    worker.execute(build(prefill([3, 4])))
    thief = prefill([3, 4], row=0)
    thief.row_assignments[0].token_ids = pack_int32([1, 2, 3, 4, 5])
    thief.row_ids.append(1)
    thief.q_lens.append(1)
    thief.seq_lens.append(6)
    thief.sample_indices.append(1)
    with pytest.raises(WorkerViolationError, match="row 1 would read foreign"):
        worker.execute(build(thief, step_id=2))
