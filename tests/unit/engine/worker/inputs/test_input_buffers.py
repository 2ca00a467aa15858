import numpy as np
import pytest
import torch

from models.cudagraph_mode import GraphKind
from models.forward_context import GraphKey
from services.engine.batch import RowAssignment, pack_int32
from services.engine.compilation.graphs.capture_plan import full_decode_key
from services.engine.limits import StepLimits
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.input_buffers import InputBuffers

LIMITS = StepLimits(
    max_num_seqs=4, max_num_batched_tokens=16, max_model_len=10, block_size=4, vocab_size=100
)


@pytest.fixture
def buffers():
    buffers = InputBuffers(LIMITS, torch.device("cpu"))
    buffers.write_tables([assignment(2, range(20, 28)), assignment(0, [5, 6, 7])], None)
    return buffers


def assignment(row, token_ids):
    return RowAssignment(row=row, token_ids=pack_int32(list(token_ids)), num_prompt_tokens=1)


def step(rows, q_lens, seq_lens, sample_indices=()):
    return Batch(
        query_start_loc=np.cumsum([0, *q_lens], dtype=np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        row_ids=np.array(rows, np.int32),
        sample_indices=np.array(sample_indices, np.int32),
        num_tokens=sum(q_lens),
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(seq_lens),
        is_prefill=max(q_lens) > 1,
    )


def write(buffers, batch):
    buffers.write(batch)
    return buffers.gather_batch(batch)


def gather(buffers, header, num_tokens, **options):
    return buffers.gather(header, num_tokens, max_seqlen_q=10, max_seqlen_k=10, **options)


def mixed_key(num_tokens, graph_bs):
    return GraphKey(
        kind=GraphKind.MIXED, num_tokens=num_tokens, graph_bs=graph_bs, max_q_len=num_tokens
    )


def test_a_mixed_step_gathers_each_query_token_and_its_position(buffers):
    inputs = write(buffers, step([2, 0, 1], [4, 1, 2], [7, 3, 2], [1]))
    assert inputs.input_ids.tolist() == [23, 24, 25, 26, 7, 0, 0]
    assert inputs.positions.tolist() == [3, 4, 5, 6, 2, 0, 1]
    assert inputs.token_request.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert inputs.query_start_loc.tolist() == [0, 4, 5, 7]
    assert inputs.sample_indices.tolist() == [1]


def test_a_decode_step_reads_the_token_that_was_appended(buffers):
    rows, lengths = torch.tensor([0, 2]).int(), torch.tensor([3, 8]).int()
    buffers.append_tokens(rows, lengths, torch.tensor([71, 72]).int())
    inputs = write(buffers, step([2, 0], [1, 1], [9, 4], [0, 1]))
    assert inputs.input_ids.tolist() == [72, 71]
    assert inputs.positions.tolist() == [8, 3]
    assert inputs.token_request.tolist() == [0, 1]


def test_a_token_past_a_full_sequence_touches_no_other_row(buffers):
    before = buffers.tokens.clone()
    buffers.append_tokens(*(torch.tensor([value]).int() for value in (0, 10, 99)))
    assert torch.equal(buffers.tokens[1:], before[1:])
    assert torch.equal(buffers.tokens[0, :10], before[0, :10])


def test_inputs_stay_at_their_addresses_from_step_to_step(buffers):
    names = ("input_ids", "positions", "query_start_loc", "seq_lens", "row_ids", "sample_indices")
    first = write(buffers, step([2, 0], [4, 1], [7, 3], [1]))
    addresses = [getattr(first, name).data_ptr() for name in names]
    second = write(buffers, step([0, 2, 1], [1, 1, 1], [3, 8, 1], [0, 2]))
    assert [getattr(second, name).data_ptr() for name in names] == addresses


def test_block_writes_land_at_their_offsets_and_a_new_owner_starts_with_none(buffers):
    buffers.write_tables([], np.array([[6, 7, 1], [9, 4, 3]], np.int32))
    assert buffers.block_table[:3].tolist() == [[0, 3, 0], [0, 0, 0], [9, 4, 0]]
    assert not buffers.block_table[3:].any()
    buffers.write_tables([assignment(2, [1])], None)
    assert buffers.block_table[2].tolist() == [0, 0, 0]


def test_decodes_are_filled_up_with_requests_that_own_no_block(buffers):
    header = buffers.write(step([2, 0], [1, 1], [8, 3], [1]), full_decode_key(4))
    assert (header.row_ids.tolist(), header.sample_indices.tolist()) == ([2, 0], [1])
    padded = gather(buffers, buffers.header(4), 4)
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert padded.seq_lens.tolist() == [8, 3, 1, 1]
    assert padded.row_ids.tolist() == [2, 0, buffers.dummy_row, buffers.dummy_row]
    assert padded.input_ids.tolist() == [27, 7, 0, 0]
    assert padded.positions.tolist() == [7, 2, 0, 0]
    assert not buffers.block_table[buffers.dummy_row].any()


def test_a_step_with_prompts_is_filled_up_with_requests_that_take_the_padding(buffers):
    batch = step([2, 0], [3, 1], [7, 3], [1])
    header = buffers.write(batch, mixed_key(num_tokens=16, graph_bs=3))
    assert header.seq_lens.tolist() == [7, 3]
    assert header.append_positions.tolist() == [10, 3]
    assert header.sample_indices.tolist() == [1]
    filled = buffers.header(5)
    # A sequence has 10 tokens at most.
    assert filled.query_start_loc.tolist() == [0, 3, 4, 14, 16, 16]
    assert filled.seq_lens.tolist() == [7, 3, 10, 2, 0]
    assert filled.row_ids.tolist() == [2, 0] + [buffers.dummy_row] * 3
    inputs = gather(buffers, filled, 16, lengths_vary=True)
    assert inputs.positions.tolist() == [4, 5, 6, 2, *range(10), 0, 1]
    assert inputs.token_request.tolist() == [0] * 3 + [1] + [2] * 10 + [3] * 2
    assert inputs.input_ids[:4].tolist() == [24, 25, 26, 7]


def test_as_many_dummies_as_tokens_still_leave_each_token_its_request(buffers):
    buffers.write(step([0], [2], [3]), mixed_key(num_tokens=4, graph_bs=2))
    inputs = gather(buffers, buffers.header(4), 4, lengths_vary=True)
    assert inputs.positions.tolist() == [1, 2, 0, 1]
    assert inputs.token_request.tolist() == [0, 0, 1, 1]


def test_what_a_graph_reads_stays_where_it_is(buffers):
    key = full_decode_key(4)
    before = {name: tensor.data_ptr() for name, tensor in buffers.fixed(key).items()}
    buffers.write(step([2, 0], [1, 1], [8, 3], [1]), full_decode_key(4))
    write(buffers, step([2, 0], [4, 1], [7, 3], [1]))
    assert {
        name: tensor.data_ptr() for name, tensor in buffers.fixed(full_decode_key(4)).items()
    } == before
