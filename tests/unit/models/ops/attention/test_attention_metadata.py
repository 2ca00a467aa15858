import pytest
import torch

from models.ops.attention.attention_metadata import build_attention_metadata

BLOCK_SIZE = 4
BLOCK_TABLE = torch.tensor(
    [[9, 3, 7, 0], [0, 0, 0, 0], [5, 2, 0, 0], [8, 0, 0, 0]], dtype=torch.int32
)


def build(*, rows, query_lens, seq_lens):
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    positions = [
        position
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    return build_attention_metadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        row_ids=torch.tensor(rows, dtype=torch.int32),
        block_table=BLOCK_TABLE,
        positions=torch.tensor(positions),
        token_request=torch.arange(len(rows)).repeat_interleave(torch.tensor(query_lens)),
        block_size=BLOCK_SIZE,
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(seq_lens),
    )


def test_slots_follow_the_block_table():
    metadata = build(rows=[0, 2], query_lens=[3, 2], seq_lens=[9, 5])
    assert metadata.slot_mapping.dtype == torch.int64
    assert metadata.slot_mapping.tolist() == [3 * 4 + 2, 3 * 4 + 3, 7 * 4, 5 * 4 + 3, 2 * 4]


def test_block_tables_are_cut_to_the_longest_sequence():
    metadata = build(rows=[2, 3], query_lens=[1, 1], seq_lens=[5, 2])
    assert metadata.block_tables.tolist() == [[5, 2], [8, 0]]


def test_single_tokens_form_one_group_and_see_their_own_length():
    (group,) = build(rows=[2, 3], query_lens=[1, 1], seq_lens=[5, 2]).groups
    assert (group.first_token, group.num_requests, group.num_queries) == (0, 2, 1)
    assert group.block_ids.tolist() == [5, 2, 8, 0]
    assert group.mask.shape == (2, 1, 1, 8)
    assert group.mask.sum(-1).flatten().tolist() == [5, 2]


def test_chunk_sees_its_prefix_and_no_token_after_its_own():
    (group,) = build(rows=[0], query_lens=[3], seq_lens=[6]).groups
    assert group.num_queries == 3
    assert group.block_ids.tolist() == [9, 3]
    assert group.mask.sum(-1).flatten().tolist() == [4, 5, 6]
    assert group.mask[0, 0, 0].tolist() == [True] * 4 + [False] * 4


def test_chunk_between_single_tokens_splits_them():
    metadata = build(rows=[2, 0, 3], query_lens=[1, 3, 1], seq_lens=[5, 9, 2])
    shapes = [(g.first_token, g.num_requests, g.num_queries) for g in metadata.groups]
    assert shapes == [(0, 1, 1), (1, 1, 3), (4, 1, 1)]
    assert [g.block_ids.tolist() for g in metadata.groups] == [[5, 2], [9, 3, 7], [8]]


@pytest.mark.parametrize(("max_keys", "sizes"), [(4, [1, 1, 1]), (16, [2, 1]), (4096, [3])])
def test_groups_keep_to_the_limit_of_key_positions(monkeypatch, max_keys, sizes):
    monkeypatch.setattr("models.ops.attention.attention_metadata.CPU_GROUP_KEYS", max_keys)
    groups = build(rows=[2, 3, 0], query_lens=[1, 1, 1], seq_lens=[5, 2, 9]).groups
    assert [group.num_requests for group in groups] == sizes


def test_dummy_row_writes_to_the_null_block_and_keeps_attention_finite():
    metadata = build_attention_metadata(
        query_start_loc=torch.tensor([0, 1]),
        seq_lens=torch.tensor([0]),
        row_ids=torch.tensor([1]),
        block_table=BLOCK_TABLE,
        positions=torch.tensor([0]),
        token_request=torch.tensor([0]),
        block_size=BLOCK_SIZE,
        max_seqlen_q=1,
        max_seqlen_k=1,
    )
    assert metadata.slot_mapping.tolist() == [0]
    assert metadata.groups[0].mask.sum() == 1
