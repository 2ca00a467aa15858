import pytest
import torch

from models.kernels.products.wide_configurations import invariant_wide_tiles, wide_tiles
from models.kernels.tuning.tiles import WideTiles
from tests.support.gpu_facts import use_gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    use_gpu(monkeypatch)
    yield
    wide_tiles.cache_clear()
    invariant_wide_tiles.cache_clear()


def tiles_of(num_tokens, num_outputs, num_inputs, *, is_gated=True, dtype=torch.bfloat16):
    return wide_tiles(
        num_tokens, num_outputs, num_inputs, is_gated=is_gated, dtype=dtype, device=CUDA
    )


def test_a_gated_product_is_left_to_torch_where_tiles_leave_multiprocessors_idle():
    assert tiles_of(128, 12288, 4096) == WideTiles(groups=3, tokens=128, slots=5)
    assert tiles_of(8192, 12288, 4096) == WideTiles(groups=3, tokens=256, slots=3)
    assert tiles_of(129, 12288, 4096) is None


def test_few_outputs_are_summed_in_parts_that_fill_the_multiprocessors():
    assert tiles_of(128, 1024, 2048, is_gated=False).splits == 4
    assert tiles_of(256, 1024, 3072, is_gated=False).splits == 4
    assert tiles_of(257, 1024, 3072, is_gated=False) is None
    assert tiles_of(128, 4096, 12288, is_gated=False).splits == 4
    assert tiles_of(128, 4096, 4096, is_gated=False) is None


def test_few_outputs_of_long_inputs_have_two_groups_where_few_parts_fit():
    for size, splits in (((1536, 8960), 5), ((2048, 6144), 4), ((1152, 6912), 7)):
        for num_tokens in (130, 256):
            tiles = tiles_of(num_tokens, *size, is_gated=False)
            assert (tiles.groups, tiles.splits) == (2, splits)
        assert tiles_of(128, *size, is_gated=False).groups == 1
    assert tiles_of(256, 1024, 8192, is_gated=False).groups == 1
    assert tiles_of(256, 2048, 2048, is_gated=False).groups == 1


def test_short_inputs_may_leave_more_gaps_as_torchs_pass_over_gate_and_up_costs_more():
    assert tiles_of(384, 6912, 1152) == WideTiles(groups=3, tokens=128, slots=5)
    assert tiles_of(700, 6912, 1152) == WideTiles(groups=3, tokens=256, slots=3)
    assert tiles_of(384, 6912, 4096) is None
    assert tiles_of(384, 14784, 4096) == WideTiles(groups=3, tokens=128, slots=5)
    for num_tokens, size in (
        (340, (8192, 2048)), (500, (8192, 2048)), (440, (8960, 1536)), (384, (14784, 8192)),
        (256, (21504, 5376)), (600, (7168, 8192)), (250, (28672, 8192)),
    ):  # fmt: skip
        assert tiles_of(num_tokens, *size) is None


def test_what_was_not_measured_is_left_to_torch():
    assert tiles_of(128, 12288, 4096, dtype=torch.float16) is None
    assert tiles_of(128, 12284, 4096) is None
    assert tiles_of(128, 12288, 4100) is None


def test_a_program_fits_into_a_multiprocessor():
    sizes = (1024, 2560, 3072, 6144, 9728, 12288, 14336, 17408, 25600)
    found = {tiles_of(tokens, size, 4096) for tokens in range(65, 2049) for size in sizes}
    for tiles in found - {None}:
        num_bytes = (64 * tiles.groups + tiles.tokens) * 64 * 2 * tiles.slots
        # The results of a tile pass through memory after the slots: of half as many rows as read.
        assert num_bytes + 32 * tiles.groups * tiles.tokens * 2 < 227 * 1024


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_batch_invariant_tiles_keep_the_parts_of_a_weight(parts):
    for num_tokens in range(65, 2049):
        tiles = invariant_wide_tiles(num_tokens, 2048, parts, device=CUDA)
        assert tiles.splits * tiles.parts == parts


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "parts", "expected"),
    [
        (128, 4096, 2, WideTiles(groups=1, tokens=128, slots=7, splits=2)),
        (256, 4096, 2, WideTiles(groups=1, tokens=256, slots=5, splits=2)),
        (256, 2048, 4, WideTiles(groups=1, tokens=256, slots=5, splits=4)),
        (256, 6144, 1, WideTiles(groups=2, tokens=128, slots=6)),
        (512, 4096, 2, WideTiles(groups=2, tokens=128, slots=6, parts=2)),
        (1100, 4096, 2, WideTiles(groups=2, tokens=128, slots=6, parts=2)),
        (2048, 4096, 2, WideTiles(groups=2, tokens=256, slots=4, parts=2)),
        (8192, 2048, 4, WideTiles(groups=2, tokens=128, slots=6, parts=4)),
        (600, 6144, 1, WideTiles(groups=3, tokens=128, slots=5)),
        (1024, 8192, 1, WideTiles(groups=2, tokens=256, slots=4)),
        (2048, 6144, 1, WideTiles(groups=3, tokens=256, slots=3)),
    ],
)
def test_batch_invariant_tiles_fill_the_multiprocessors(num_tokens, num_rows, parts, expected):
    assert invariant_wide_tiles(num_tokens, num_rows, parts, device=CUDA) == expected


@pytest.mark.parametrize(
    ("num_rows", "parts"), [(6144, 1), (8192, 1), (4096, 2), (2048, 4), (24576, 1), (151936, 1)]
)
def test_a_batch_invariant_program_fits_into_a_multiprocessor(num_rows, parts):
    for num_tokens in range(65, 2049):
        tiles = invariant_wide_tiles(num_tokens, num_rows, parts, device=CUDA)
        num_bytes = (64 * tiles.groups + tiles.tokens) * 64 * 2 * tiles.slots
        assert num_bytes + 32 * tiles.groups * tiles.tokens * 2 < 227 * 1024
