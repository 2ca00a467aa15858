"""The table of products: which are whose, and that a GPU has room for their tiles."""

import pytest
import torch

from models.kernels.products.linear_configurations import skinny_tiles
from models.kernels.tuning.tiles import MatrixTiles, VectorTiles
from tests.support.gpu_facts import use_gpu

SHARED_BYTES = 227 * 1024
SIZES = [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (2560, 9728), (151936, 4096)]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    use_gpu(monkeypatch)
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


@pytest.mark.parametrize("num_outputs", [8, 32, 64])
def test_few_outputs_have_one_form_that_fits_shared_memory(num_outputs):
    forms = {tiles_of(num_tokens, num_outputs, 2880) for num_tokens in range(3, 129)}
    (tiles,) = forms
    stage_bytes = (tiles.rows + tiles.tokens) * tiles.columns * 2 + 8
    sum_bytes = tiles.rows * tiles.tokens * 4
    slots = tiles.groups * tiles.num_stages
    assert stage_bytes * slots + sum_bytes * (tiles.groups - 1) <= SHARED_BYTES
    assert tiles.splits == 1
    assert num_outputs <= tiles.rows


def test_33_to_64_tokens_take_one_part_where_halves_would_make_a_second_wave():
    for size in ((5120, 4096), (5120, 17408), (5376, 4096), (6144, 4096), (6144, 2560)):
        for num_tokens in (33, 64):
            assert tiles_of(num_tokens, *size).splits == 1
    assert tiles_of(32, 5120, 4096).splits == 2
    assert tiles_of(64, 4096, 4096).splits == 2
    assert tiles_of(64, 2560, 9728).splits == 4


def test_33_to_64_tokens_of_more_outputs_or_short_inputs_are_left_to_torch():
    for size in ((7168, 5120), (8192, 5376), (4096, 1024), (5376, 1024)):
        assert tiles_of(64, *size) is None


def test_what_was_not_measured_is_left_to_torch():
    assert tiles_of(65, 4096, 4096) is None
    assert tiles_of(8, 4096, 4096, dtype=torch.float16) is None
    assert tiles_of(8, 128, 4096) is None
    assert tiles_of(129, 32, 2880) is None
    assert tiles_of(8, 32, 2880, is_gated=True) is None
    # The copy engine takes rows that are multiples of 16 bytes.
    assert tiles_of(8, 4096, 4100) is None
