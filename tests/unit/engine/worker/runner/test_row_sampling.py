import numpy as np
import pytest
import torch

from services.engine.batch import row_assignment
from services.engine.worker.runner.row_sampling import RowSamplingTable, SampledRows
from tests.support.step_driver import sampling

TOKENS = torch.zeros(9, 33, dtype=torch.int32)


def table():
    table = RowSamplingTable(num_rows=8, vocab_size=50, device=torch.device("cpu"))
    params = [
        {"temperature": 0.5, "top_k": 3, "seed": 7},
        {"repetition_penalty": 1.5},
        {"min_tokens": 2, "end_token_ids": frozenset([4])},
        {"logit_bias": ((9, 2.5),), "logprobs": 3},
    ]
    table.assign(
        [
            row_assignment(
                row=7 - i, token_ids=[1, 2], num_prompt_tokens=2, sampling=sampling(**each)
            )
            for i, each in enumerate(params)
        ]
    )
    return table


def rows(row_ids, seq_lens, num_uncertain=0):
    host = np.array(row_ids, np.int32), np.array(seq_lens, np.int32)
    return SampledRows(
        row_ids=torch.from_numpy(host[0]),
        seq_lens=torch.from_numpy(host[1]),
        host_row_ids=host[0],
        host_seq_lens=host[1] + num_uncertain,
        host_least_lens=host[1] - num_uncertain,
    )


def test_rows_get_their_own_parameters_in_the_order_of_the_batch():
    choice = table().choice(rows([5, 7], [8, 9]))
    assert choice.temperature.tolist() == [0, 0.5]
    assert choice.top_k.tolist() == [0, 3]
    assert choice.seeds[1] == 7
    assert choice.positions.tolist() == [8, 9]
    assert all(getattr(choice, name).is_contiguous() for name in choice.__slots__)


def test_only_rows_with_edits_are_named_and_steps_alike_upload_nothing():
    parameters = table()
    first = parameters.edits(rows([7, 6, 4], [5, 5, 5]), TOKENS)
    again = parameters.edits(rows([7, 6, 4], [6, 6, 6]), TOKENS)
    assert first.indices.tolist() == [1, 2]
    assert again.indices is first.indices
    assert first.penalties.row_ids.tolist() == [6, 4]
    assert again.penalties.seq_lens.tolist() == [6, 6]
    other = parameters.edits(rows([4, 7], [5, 5]), TOKENS)
    assert other.indices.tolist() == [0]


def test_min_tokens_edits_a_row_until_it_has_them():
    parameters = table()
    short = parameters.edits(rows([7, 5], [3, 3]), TOKENS)
    assert short.indices.tolist() == [1]
    ((token_ids, values),) = short.biases
    assert token_ids.tolist() == [[4]]
    assert values.tolist() == [[-torch.inf]]
    assert parameters.edits(rows([7, 5], [4, 4]), TOKENS) is None


@pytest.mark.parametrize(("length", "value"), [(3, -torch.inf), (4, 0.0)])
def test_where_the_host_does_not_know_a_length_the_device_decides_on_min_tokens(length, value):
    edits = table().edits(rows([5], [length], num_uncertain=2), TOKENS)
    ((_, values),) = edits.biases
    assert values.tolist() == [[value]]


def test_the_most_log_probabilities_that_a_row_wants_are_returned():
    assert table().num_logprobs(rows([7, 4], [5, 5])) == 3
