"""Positions of a step's drafts, and the sampling after them."""

import numpy as np
import pytest

from services.engine.batch import SpecDecodeMetadata, pack_int32
from services.engine.spec_decode.verification import NO_DRAFT
from services.engine.worker.inputs.drafts import Drafts


def read(counts, token_ids, *, q_lens=(3, 4, 2), sample_indices=(0, 2), num_steps=2):
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    return Drafts.read(
        SpecDecodeMetadata(
            draft_token_ids=pack_int32(token_ids),
            num_spec_steps=num_steps,
            num_draft_tokens=pack_int32(counts),
        ),
        query_start_loc=starts,
        seq_lens=np.array([10, 20, 30], np.int32)[: len(q_lens)],
        row_ids=np.array([5, 6, 7], np.int32)[: len(q_lens)],
        sample_indices=np.array(sample_indices, np.int32),
        vocab_size=100,
    )


def test_a_token_is_sampled_after_each_draft_and_before_the_first():
    drafts = read([2, 0, 1], [41, 42, 43])
    assert drafts.token_ids.tolist() == [[41, 42], [43, NO_DRAFT]]
    # Query tokens 0, 1, 2 are the first request's; the third one's are 7 and 8.
    assert drafts.token_indices.tolist() == [[0, 1, 2], [7, 8, 8]]
    assert drafts.positions.tolist() == [[8, 9, 10], [29, 30, 30]]
    assert drafts.row_ids.tolist() == [[5, 5, 5], [7, 7, 7]]


def test_a_request_without_drafts_samples_after_its_prompts_last_token_only():
    drafts = read([0, 0, 0], [])
    assert drafts.token_indices.tolist() == [[2, 2, 2], [8, 8, 8]]
    assert drafts.positions.tolist() == [[10, 10, 10], [30, 30, 30]]
    assert drafts.entries(64).shape == (2, 0)


def test_drafts_are_written_after_the_known_tokens_of_their_rows():
    entries = read([2, 0, 1], [41, 42, 43]).entries(64)
    assert entries.tolist() == [[5 * 64 + 8, 5 * 64 + 9, 7 * 64 + 29], [41, 42, 43]]


@pytest.mark.parametrize(
    ("counts", "token_ids", "found"),
    [
        ([2, 0], [1, 2], "without its number of drafts"),
        ([2, 0, 1], [1, 2], "missing or left over"),
        ([2, 0, 2], [1, 2, 3, 4], "more drafts than query tokens"),
        ([-1, 0, 1], [], "more drafts than|missing"),
        ([0, 1, 0], [1], "not verified"),
        ([1, 0, 0], [100], "outside the vocabulary"),
        ([1, 0, 0], [-1], "outside the vocabulary"),
    ],
)
def test_drafts_that_contradict_the_step_are_refused(counts, token_ids, found):
    with pytest.raises(ValueError, match=found):
        read(counts, token_ids)


def test_more_drafts_than_announced_are_refused():
    with pytest.raises(ValueError, match="more drafts than"):
        read([2, 0, 0], [1, 2], num_steps=1)
