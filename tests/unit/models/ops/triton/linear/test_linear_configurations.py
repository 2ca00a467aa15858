"""The table of products: which are whose, and that a GPU has room for their tiles."""

import pytest
import torch

from models.ops.triton.linear import linear_configurations
from models.ops.triton.linear.linear_configurations import (
    MatrixTiles,
    VectorTiles,
    skinny_tiles,
)

SHARED_BYTES = 227 * 1024
SIZES = [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (2560, 9728), (151936, 4096)]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(linear_configurations, "_capability", lambda device: (9, 0))
    skinny_tiles.cache_clear()
    yield
    skinny_tiles.cache_clear()


def tiles_of(num_tokens, num_outputs, num_inputs, *, is_gated=False, dtype=torch.bfloat16):
    return skinny_tiles(
        num_tokens, num_outputs, num_inputs,
        is_gated=is_gated, dtype=dtype, device=torch.device("cuda"),
    )  # fmt: skip


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_fit_shared_memory_and_hold_all_tokens(size, is_gated):
    assert all(isinstance(tiles_of(count, *size), VectorTiles) for count in (1, 2))
    for num_tokens in range(3, 65):
        tiles = tiles_of(num_tokens, *size, is_gated=is_gated)
        if tiles is not None:
            assert isinstance(tiles, MatrixTiles)
            assert num_tokens <= tiles.tokens < 2 * max(num_tokens, 8)
            stage_bytes = (tiles.rows + tiles.tokens) * tiles.columns * 2 + 8
            assert stage_bytes * tiles.num_stages <= SHARED_BYTES
            assert tiles.splits == 1 or not is_gated
            assert tiles.unsplit().splits == 1


def test_what_was_not_measured_is_left_to_torch():
    assert tiles_of(65, 4096, 4096) is None
    assert tiles_of(8, 4096, 4096, dtype=torch.float16) is None
    assert tiles_of(8, 128, 4096) is None
    # The copy engine takes rows that are multiples of 16 bytes.
    assert tiles_of(8, 4096, 4100) is None
