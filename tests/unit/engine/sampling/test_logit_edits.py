from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from models.ops.sampling.penalize_tokens import Penalties
from services.engine.sampling.logit_edits import LogitEdits, edit_logits
from services.engine.sampling.sampler import greedy

VOCAB = 20
HISTORY = torch.tensor(
    [[3, 3, 5, 7, 7, 7], [1, 2, 3, 19, 19, 19], [4, 4, 4, 4, 4, 4]], dtype=torch.int32
)
SEQ_LENS = torch.tensor([6, 3, 5], dtype=torch.int32)
NUM_PROMPT = torch.tensor([2, 3, 1])


@pytest.fixture
def logits():
    return torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))


def penalties(repetition=1.0, frequency=0.0, presence=0.0):
    return Penalties(
        tokens=HISTORY,
        row_ids=torch.arange(3, dtype=torch.int32),
        seq_lens=SEQ_LENS,
        num_prompt_tokens=NUM_PROMPT,
        repetition=torch.full((3,), repetition),
        frequency=torch.full((3,), frequency),
        presence=torch.full((3,), presence),
    )


def apply_penalties(logits, penalties):
    return edit_logits(logits, LogitEdits(indices=torch.arange(3), penalties=penalties, biases=()))


@pytest.mark.parametrize("value", [0.5, 1.0, 1.8])
def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output(logits, value):
    ours = apply_penalties(logits, penalties(repetition=value))
    processor = RepetitionPenaltyLogitsProcessor(value)
    for row, length in enumerate(SEQ_LENS.tolist()):
        ids = HISTORY[row : row + 1, :length].long()
        torch.testing.assert_close(ours[row], processor(ids, logits[row : row + 1].clone())[0])


def test_frequency_counts_output_tokens_only(logits):
    change = logits - apply_penalties(logits, penalties(frequency=0.5))
    expected = torch.zeros(3, VOCAB)
    expected[0, 5], expected[0, 7], expected[2, 4] = 0.5, 1.5, 2.0
    torch.testing.assert_close(change, expected)


def test_presence_counts_an_output_token_once(logits):
    change = logits - apply_penalties(logits, penalties(presence=-1.0))
    expected = torch.zeros(3, VOCAB)
    expected[0, 5] = expected[0, 7] = expected[2, 4] = -1.0
    torch.testing.assert_close(change, expected)


def test_tokens_after_a_sequence_are_ignored(logits):
    changed = apply_penalties(logits, penalties(repetition=2.0, frequency=1.0, presence=1.0))
    assert torch.equal(changed[1, 19], logits[1, 19])


def test_edits_touch_only_their_rows_and_leave_the_input_alone(logits):
    before = logits.clone()
    bias = (
        torch.tensor([[7, 0], [9, 8]], dtype=torch.int32),
        torch.tensor([[100.0, 0.0], [-100.0, 2.5]]),
    )
    edits = LogitEdits(indices=torch.tensor([2, 0]), penalties=None, biases=(bias,))
    edited = edit_logits(logits, edits)
    assert torch.equal(logits, before)
    expected = before.clone()
    expected[2, 7] += 100
    expected[0, 9] -= 100
    expected[0, 8] += 2.5
    torch.testing.assert_close(edited, expected)


def test_a_bias_of_100_wins_and_of_minus_100_loses(logits):
    best = greedy(logits)
    wanted = (best + 5) % VOCAB
    bias = (torch.stack([wanted, best], 1), torch.tensor([[100.0, -100.0]] * 3))
    edits = LogitEdits(indices=torch.arange(3), penalties=None, biases=(bias,))
    edited = edit_logits(logits, edits)
    assert torch.equal(greedy(edited), wanted)
    assert torch.equal(edited.argmin(-1), best)


def test_penalties_come_after_biases_and_a_forbidden_token_stays_forbidden(logits):
    rows = penalties(repetition=2.0)
    bias = (torch.full((3, 1), 3), torch.full((3, 1), 1.5))
    forbidden = (torch.full((3, 1), 5), torch.full((3, 1), -torch.inf))
    late = (torch.full((3, 1), 5), torch.full((3, 1), 100.0))
    edits = LogitEdits(indices=torch.arange(3), penalties=rows, biases=(bias, forbidden, late))
    edited = edit_logits(logits, edits)
    biased = logits.clone()
    biased[:, 3] += 1.5
    torch.testing.assert_close(edited[:, 3], apply_penalties(biased, rows)[:, 3])
    assert (edited[:, 5] == -torch.inf).all()


def test_in_place_edits_need_no_copy_and_half_precision_becomes_float32(logits):
    edits = LogitEdits(indices=torch.arange(3), penalties=penalties(frequency=1.0), biases=())
    expected = edit_logits(logits, edits)
    half = edit_logits(logits.bfloat16(), edits, in_place=True)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, expected, rtol=1e-2, atol=1e-2)
    assert edit_logits(logits, edits, in_place=True) is logits
    assert torch.equal(logits, expected)


def test_penalties_find_each_sequence_in_its_row_of_the_table(logits):
    table = torch.full((6, 9), 19, dtype=torch.int32)
    row_ids = torch.tensor([4, 0, 2], dtype=torch.int32)
    table[row_ids.long(), : HISTORY.shape[1]] = HISTORY
    rows = penalties(repetition=1.5, frequency=0.5, presence=0.25)
    moved = replace(rows, tokens=table, row_ids=row_ids)
    assert torch.equal(apply_penalties(logits, moved), apply_penalties(logits, rows))


@pytest.mark.parametrize("value", [-4.0, 0.5, 4.0])
def test_a_bias_and_a_repetition_penalty_are_those_of_transformers(logits, value):
    bias = (torch.tensor([[3, 9]] * 3), torch.tensor([[value, -value]] * 3))
    edits = LogitEdits(indices=torch.arange(3), penalties=penalties(repetition=1.7), biases=(bias,))
    ours = edit_logits(logits, edits)
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[3], value], [[9], -value]]),
            RepetitionPenaltyLogitsProcessor(1.7),
        ]
    )
    for row, length in enumerate(SEQ_LENS.tolist()):
        ids = HISTORY[row : row + 1, :length].long()
        torch.testing.assert_close(ours[row], processors(ids, logits[row : row + 1].clone())[0])
