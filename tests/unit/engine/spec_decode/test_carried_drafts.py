"""Descriptors of steps that were ordered before their drafts were known."""

from services.engine.batch import BatchDescriptor, StepResult, pack_int32, read_int32
from services.engine.spec_decode.carried_drafts import CarriedDrafts


def step(rows, seq_lens, counts, token_ids=(), carried=(), sampling=None):
    descriptor = BatchDescriptor()
    descriptor.attn_metadata.row_ids = pack_int32(rows)
    descriptor.attn_metadata.seq_lens = pack_int32(seq_lens)
    descriptor.attn_metadata.max_seqlen_k = max(seq_lens)
    descriptor.sampling.sample_indices = pack_int32(
        range(len(rows)) if sampling is None else sampling
    )
    metadata = descriptor.spec_decode_metadata
    metadata.num_draft_tokens = pack_int32(counts)
    metadata.draft_token_ids = pack_int32(token_ids)
    metadata.carried_requests = pack_int32(carried)
    return descriptor


def result(num_accepted, drafts):
    return StepResult(
        num_accepted_tokens=pack_int32(num_accepted), draft_token_ids=pack_int32(drafts)
    )


def test_lengths_and_drafts_come_from_the_result_of_the_same_row():
    rows = CarriedDrafts(max_num_seqs=4, num_drafts=2)
    rows.complete(step([3, 1], [12, 7], [2, 0], [8, 9]), result([1, 0], [[41, 42], [51, 52]]))
    # 10 tokens, one draft that held and the token after it; 7 tokens and the one after them.
    later = step([1, 3, 0], [10, 15, 5], [1, 2, 1], [60], carried=[0, 1])
    rows.complete(later, result([0, 0, 0], [[0, 0]] * 3))
    assert read_int32(later.attn_metadata.seq_lens).tolist() == [8 + 1, 12 + 2, 5]
    assert later.attn_metadata.max_seqlen_k == 14
    assert read_int32(later.spec_decode_metadata.draft_token_ids).tolist() == [51, 41, 42, 60]
    assert not later.spec_decode_metadata.carried_requests


def test_a_carried_step_is_the_base_of_the_next_one():
    rows = CarriedDrafts(max_num_seqs=1, num_drafts=2)
    rows.complete(step([0], [5], [0]), result([0], [[1, 2]]))
    rows.complete(step([0], [8], [2], carried=[0]), result([0], [[3, 4]]))
    last = step([0], [11], [2], carried=[0])
    rows.complete(last, result([0], [[5, 6]]))
    assert read_int32(last.attn_metadata.seq_lens).tolist() == [6 + 1 + 2]
    assert read_int32(last.spec_decode_metadata.draft_token_ids).tolist() == [3, 4]


def test_a_step_that_names_its_drafts_stays_as_it_is():
    rows = CarriedDrafts(max_num_seqs=2, num_drafts=1)
    named = step([0, 1], [4, 9], [0, 1], [7], sampling=[1])
    expected = BatchDescriptor.FromString(named.SerializeToString())
    rows.complete(named, result([1], [[3]]))
    assert named == expected
