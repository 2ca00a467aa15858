import pytest
import torch

from models.kernels.products.fp8.fp8_configurations import (
    BUILT_TOKENS,
    FP8_TOKENS,
    fp8_tiles,
    gated_fp8_tiles,
)
from models.kernels.tuning.tiles import NarrowFP8Tiles, WideFP8Tiles
from models.number_formats import BLOCK
from tests.support.gpu_facts import use_gpu

CUDA = torch.device("cuda", 0)
SHARED_BYTES = 228 * 1024
SIZES = [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (1536, 7168), (28672, 8192)]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    use_gpu(monkeypatch)
    yield
    fp8_tiles.cache_clear()
    gated_fp8_tiles.cache_clear()


def tiles_of(num_tokens, size, *, may_split=False):
    return fp8_tiles(num_tokens, *size, may_split=may_split, device=CUDA)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_programs_share_a_multiprocessor_and_hold_all_tokens(size):
    for num_tokens in range(2, 65):
        found = [(tiles_of(num_tokens, size, may_split=split), 1) for split in (False, True)]
        for is_rounded in (False, True):
            tiles = gated_fp8_tiles(num_tokens, *size, is_rounded=is_rounded, device=CUDA)
            found.append((tiles, 2))
            assert tiles.groups == 2 or not is_rounded
        for tiles, halves in found:
            assert isinstance(tiles, NarrowFP8Tiles)
            assert num_tokens <= tiles.tokens < 2 * max(num_tokens, 8)
            rows = tiles.groups * 64 * halves
            slot_bytes = (rows + tiles.tokens) * BLOCK + 4 * max(32, tiles.tokens)
            results = 4 * tiles.groups * 64 * tiles.tokens
            program_bytes = tiles.slots * slot_bytes + results + 1024
            assert tiles.slots >= 2
            assert program_bytes * tiles.programs <= SHARED_BYTES


def test_parts_are_for_who_takes_them_and_leave_each_program_enough_inputs():
    assert tiles_of(8, (4096, 12288)).splits == 1
    assert tiles_of(8, (4096, 12288), may_split=True).splits == 4
    assert tiles_of(8, (4096, 4096), may_split=True).splits == 2
    assert tiles_of(8, (28672, 8192), may_split=True).splits == 1
    assert tiles_of(8, (128, 512), may_split=True).splits == 1


@pytest.mark.parametrize(
    "size", [*SIZES, (8192, 14336), (2560, 9728), (5120, 17408), (5120, 32768)], ids=str
)
def test_kernels_of_parts_are_built_before_serving(size):
    found = {count: tiles_of(count, size, may_split=True) for count in range(65, 4096)}
    for count, tiles in found.items():
        if tiles.splits > 1:
            # Of these, no larger step than the largest is run.
            assert tiles in [found[each] for each in BUILT_TOKENS if each < count + FP8_TOKENS]
    assert found[4095].splits == 1


def test_long_inputs_in_halves_fill_waves():
    for num_tokens, splits in ((96, 2), (200, 2), (512, 1), (576, 1), (768, 1), (2048, 1)):
        assert tiles_of(num_tokens, (4096, 12288), may_split=True).splits == splits
    assert tiles_of(576, (8192, 28672), may_split=True).splits == 2


def test_long_inputs_in_thirds_fill_what_halves_leave_idle():
    for size in ((5120, 32768), (5120, 25600), (2560, 10240), (2560, 9728)):
        for num_tokens in (160, 256):
            assert tiles_of(num_tokens, size, may_split=True).splits == 3
            assert tiles_of(num_tokens, size).splits == 1
    for num_tokens, size in ((384, (5120, 32768)), (320, (2560, 9728)), (700, (5120, 25600))):
        assert tiles_of(num_tokens, size, may_split=True).splits == 1


def test_parts_are_not_worth_the_start_of_another_wave_of_shorter_inputs():
    for size in ((5120, 8192), (5120, 13824), (5120, 17408), (5376, 21504)):
        for num_tokens in (160, 200, 256):
            assert tiles_of(num_tokens, size, may_split=True).splits == 1
    assert tiles_of(900, (5120, 25600), may_split=True).splits == 1


def test_one_tile_of_tokens_is_bound_by_loading_which_halves_saturate():
    for num_inputs in (8192, 13824, 17408, 25600):
        assert tiles_of(96, (5120, num_inputs), may_split=True).splits == 2
    assert tiles_of(96, (5376, 21504), may_split=True).splits == 2


def test_more_tokens_take_wide_tiles():
    assert isinstance(tiles_of(65, (4096, 4096)), WideFP8Tiles)
    assert isinstance(gated_fp8_tiles(65, 4096, 4096, is_rounded=True, device=CUDA), WideFP8Tiles)


def test_sizes_that_the_copy_engine_cannot_take_are_left_to_others():
    assert tiles_of(8, (4096, 200)) is None
    assert tiles_of(100, (4096, 200)) is None
    assert gated_fp8_tiles(8, 4096, 200, is_rounded=False, device=CUDA) is None
