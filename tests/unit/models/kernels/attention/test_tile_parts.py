import pytest
import torch

from models.forward_context import AttentionMetadata, AttentionWorkspace
from models.kernels.attention.configurations import (
    MAX_TILE_PARTS,
    ROWS_OF_TILE,
    few_query_tiles,
    most_few_rows,
)
from models.kernels.attention.prefill.tile_parts import (
    LEAST_PART,
    MOST_TOKENS,
    deal_tiles,
    parts_of,
    share_tiles,
    split_tiles,
)
from models.kernels.tuning.tiles import MAX_SPLITS

HEAD_DIM = 128
CPU = torch.device("cpu")
ROOM = MAX_TILE_PARTS * ROWS_OF_TILE


def metadata_of(max_seqlen_k, *, room=ROOM, has_workspace=True):
    nothing = torch.zeros(1, dtype=torch.int32)
    workspace = AttentionWorkspace(
        partials=torch.empty(room * HEAD_DIM, device="meta"),
        lse=torch.empty(room, device="meta"),
        counters=torch.zeros(4, dtype=torch.int32),
    )
    return AttentionMetadata(
        query_start_loc=nothing,
        seq_lens=nothing,
        row_ids=nothing,
        block_tables=nothing,
        slot_mapping=nothing,
        groups=(),
        max_seqlen_q=5,
        max_seqlen_k=max_seqlen_k,
        workspace=workspace if has_workspace else None,
    )


def shared_by(metadata, *, num_tokens=5, num_kv_heads=8, rows_of_token=4):
    return share_tiles(
        metadata,
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        rows_of_token=rows_of_token,
        num_programs=132,
        head_dim=HEAD_DIM,
    )


def split_by(metadata, *, num_tokens=5, num_pieces=1, rows=64):
    return split_tiles(
        metadata, num_tokens=num_tokens, num_pieces=num_pieces, rows=rows, head_dim=HEAD_DIM
    )


def test_tiles_are_shared_where_a_context_may_be_long_and_tiles_few():
    long = 2 * LEAST_PART.value
    assert shared_by(metadata_of(long)).num_shares == 132
    assert shared_by(metadata_of(long - 1)).num_shares == 0
    few = shared_by(metadata_of(long), num_tokens=256, num_kv_heads=16, rows_of_token=8)
    assert few.num_shares == 132
    many = shared_by(metadata_of(long), num_tokens=256, num_kv_heads=17, rows_of_token=8)
    assert many.num_shares == 0
    assert shared_by(metadata_of(long, has_workspace=False)) is None


@pytest.mark.parametrize("room", [0, ROWS_OF_TILE, 10 * ROWS_OF_TILE, ROOM, 2 * ROOM])
def test_parts_fit_into_the_workspace(room):
    metadata = metadata_of(10**5, room=room)
    shared = shared_by(metadata)
    assert shared.num_places * shared.rows <= room
    assert shared.num_shares <= 132
    assert len(shared.plan) == 1 + shared.num_places
    for rows in (16, 64, 128):
        for num_pieces in (1, 2, 8, 33, 1000):
            split = split_by(metadata, num_pieces=num_pieces, rows=rows)
            assert split.num_places * rows <= room
            assert split.num_places == num_pieces * split.num_shares
            assert split.num_shares in (0, *range(2, MAX_SPLITS + 1))


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 128])
@pytest.mark.parametrize("num_rows", [1, 17, 300])
def test_dealt_parts_fit_into_the_workspace_and_heads_have_as_many(num_rows, num_kv_heads):
    tiles = few_query_tiles(num_rows, group=1, num_requests=1, device=CPU)
    for room in (most_few_rows(CPU), ROOM, 2 * num_kv_heads * tiles.rows):
        dealt = deal_tiles(
            metadata_of(10**5, room=room), num_programs=tiles.num_programs,
            num_kv_heads=num_kv_heads, rows=tiles.rows, head_dim=HEAD_DIM,
        )  # fmt: skip
        assert dealt.num_places * dealt.rows <= room
        assert 0 < dealt.num_places <= tiles.num_programs
        assert dealt.num_places % num_kv_heads == 0
        assert len(dealt.plan) == 1 + dealt.num_places


def test_steps_of_many_tokens_have_kernels_without_parts():
    metadata = metadata_of(10**5)
    assert shared_by(metadata, num_tokens=MOST_TOKENS) is not None
    assert split_by(metadata, num_tokens=MOST_TOKENS) is not None
    assert shared_by(metadata, num_tokens=MOST_TOKENS + 1) is None
    assert split_by(metadata, num_tokens=MOST_TOKENS + 1) is None
    assert parts_of(None) is None


def test_short_contexts_leave_no_plan():
    split = split_by(metadata_of(500))
    assert split.num_places == 0
    assert split.plan.count_nonzero() == 0
