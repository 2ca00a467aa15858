"""Dummy requests: some very long, none that writes where another one of other length does."""

import numpy as np
import pytest
import torch

from services.engine.limits import StepLimits
from services.engine.worker.inputs.dummy_steps import (
    MAX_DUMMY_KEYS,
    dummy_chunks,
    dummy_decodes,
    dummy_hidden,
    dummy_prompts,
)

LIMITS = StepLimits(
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_model_len=40960,
    block_size=16,
    vocab_size=97,
)


def decodes(batch_size, q_len=1, variant=0, **options):
    return dummy_decodes(
        LIMITS, batch_size=batch_size, q_len=q_len, row_id=256, variant=variant, **options
    )


@pytest.mark.parametrize("q_len", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("batch_size", [1, 3, 16, 40, 256])
def test_requests_of_different_length_share_no_slot(batch_size, q_len):
    for variant in (0, 1):
        arrays = decodes(batch_size, q_len, variant)
        lengths = {}
        for seq_len in arrays.seq_lens.tolist():
            for position in range(seq_len - q_len, seq_len):
                assert lengths.setdefault(position % LIMITS.block_size, seq_len) == seq_len
        assert arrays.num_tokens == batch_size * q_len == arrays.query_start_loc[-1]
        assert arrays.seq_lens.min() >= q_len


def test_two_variants_have_other_lengths_in_every_row():
    assert (decodes(40).seq_lens != decodes(40, variant=1).seq_lens).all()


def test_a_small_batch_has_a_sequence_as_long_as_can_be_and_a_large_one_a_bounded_one():
    assert decodes(4).seq_lens.max() > LIMITS.max_model_len - LIMITS.block_size
    for batch_size in (16, 64, 256):
        longest = decodes(batch_size).seq_lens.max()
        assert MAX_DUMMY_KEYS / 2 < longest * batch_size <= MAX_DUMMY_KEYS * 1.1
    assert decodes(100, max_keys=3200).seq_lens.max() <= 48


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 100, 300, 2048])
def test_prompts_fill_a_step_as_far_as_there_are_rows(num_tokens):
    for variant in (0, 1):
        arrays = dummy_prompts(LIMITS, num_tokens=num_tokens, row_id=256, variant=variant)
        assert num_tokens - LIMITS.block_size < arrays.num_tokens <= num_tokens
        assert len(set(arrays.seq_lens.tolist())) == 1
        assert set(arrays.row_ids.tolist()) == {256}


@pytest.mark.parametrize("num_tokens", [2, 7, 16, 100, 500, 512, 600, 2048])
def test_chunks_have_all_tokens_of_a_step_and_never_read_what_others_overwrite(num_tokens):
    variants = [
        dummy_chunks(LIMITS, num_tokens=num_tokens, max_requests=32, row_id=256, variant=variant)
        for variant in (0, 1)
    ]
    for arrays in variants:
        q_lens = np.diff(arrays.query_start_loc)
        assert len(q_lens) <= 32
        assert q_lens.sum() == arrays.num_tokens == num_tokens
        cached = arrays.seq_lens - q_lens
        assert len(set(cached.tolist())) == 1
        # Then a block's slots are written once by each, with the same values.
        assert not cached.any() or q_lens.max() <= LIMITS.block_size
    first, second = variants
    assert second.seq_lens.tolist() != first.seq_lens.tolist()


@pytest.mark.parametrize("variant", [0, 1])
def test_requests_that_share_slots_get_the_same_hidden_states_of_the_stage_before(variant):
    batch = dummy_chunks(LIMITS, num_tokens=2048, max_requests=128, row_id=256, variant=variant)
    hidden = dummy_hidden(torch.from_numpy(batch.positions), 8)
    states = {}
    for position, row in zip(batch.positions.tolist(), hidden, strict=True):
        assert torch.equal(states.setdefault(position, row), row)
    # Positions of 128 requests; a graph that reads another token's state would show.
    assert len(states) == 16
    assert len({tuple(row.tolist()) for row in states.values()}) == 16
