"""The table of products with weights of 4 and 8 bits."""

import pytest
import torch

from models.kernels.products.packed.packed_configurations import (
    BUILT_TOKENS,
    PACKED_COLUMNS,
    invariant_packed_tiles,
    packed_tiles,
)
from models.kernels.tuning.tiles import MatrixTiles, PackedTiles
from tests.support.gpu_facts import use_gpu

SHARED_BYTES = 227 * 1024
SIZES = [
    *((4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (28672, 4096), (4096, 14336)),
    (5120, 25600),
]
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    use_gpu(monkeypatch)
    packed_tiles.cache_clear()
    yield
    packed_tiles.cache_clear()
    invariant_packed_tiles.cache_clear()


def tiles_of(num_tokens, num_rows, num_inputs=4096, *, is_gated=False, group=128, **others):
    options = {"dtype": torch.bfloat16, "device": CUDA} | others
    return packed_tiles(num_tokens, num_rows, num_inputs, group=group, is_gated=is_gated, **options)


@pytest.mark.parametrize(
    "options", [{}, {"may_split": True}, {"is_gated": True}], ids=["whole", "split", "gated"]
)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("num_bits", [4, 8])
def test_programs_fit_into_a_multiprocessor(num_bits, size, options):
    for num_tokens in (*range(1, 1100), 2048, 8192, 100_000):
        tiles = tiles_of(num_tokens, *size, num_bits=num_bits, **options)
        if isinstance(tiles, PackedTiles):
            row_bytes = PACKED_COLUMNS * num_bits // 8
            slot_bytes = tiles.groups * 64 * row_bytes + tiles.tokens * PACKED_COLUMNS * 2
            assert tiles.slots * (slot_bytes + 16) <= SHARED_BYTES // tiles.programs - 1024
        else:
            row_bytes = tiles.columns * num_bits // 8
            stage_bytes = tiles.rows * row_bytes + tiles.tokens * tiles.columns * 2 + 8
            sums_bytes = (tiles.groups - 1) * tiles.rows * tiles.tokens * 4
            assert tiles.groups * tiles.num_stages * stage_bytes + sums_bytes <= SHARED_BYTES
            assert tiles.tokens >= min(64, num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "is_gated", "expected"),
    [
        (16, 28672, True, None),
        (24, 28672, True, None),
        (64, 28672, True, (64, 2)),
        (64, 6144, True, None),
        (80, 28672, True, (128, 2)),
        (256, 28672, True, (256, 2)),
        (640, 28672, True, (128, 3)),
        (8192, 28672, True, (256, 2)),
        (64, 6144, False, None),
        (96, 6144, False, (128, 1)),
        (256, 6144, False, (128, 2)),
        (512, 6144, False, (128, 3)),
        (2048, 6144, False, (256, 2)),
        # One program for each multiprocessor, whose warp groups share out the inputs.
        (128, 4096, False, None),
        (384, 4096, False, (128, 2)),
        (512, 1024, False, None),
    ],
)
@pytest.mark.parametrize("num_bits", [4, 8])
def test_tiles_fill_the_multiprocessors(num_bits, num_tokens, num_rows, is_gated, expected):
    tiles = tiles_of(num_tokens, num_rows, num_bits=num_bits, is_gated=is_gated)
    if expected is None:
        assert isinstance(tiles, MatrixTiles)
    else:
        assert (tiles.tokens, tiles.groups) == expected


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        # Warp groups, splits and stages for up to 16, 32 and 64 tokens.
        (1024, [(3, 4, 2), (1, 4, 4), (1, 4, 2)]),
        (2560, [(3, 3, 2), (1, 4, 4), (1, 4, 2)]),
        (4096, [(3, 2, 2), (1, 4, 4), (1, 4, 2)]),
        (5120, [(3, 1, 2), (1, 3, 4), (1, 3, 2)]),
        (8192, [(3, 1, 2), (1, 2, 4), (1, 2, 2)]),
        # Of three groups, a second wave would be mostly idle.
        (10240, [(3, 1, 2), (1, 1, 4), (1, 1, 2)]),
        (16384, [(3, 1, 2), (3, 1, 2), (1, 1, 2)]),
    ],
)
def test_sums_are_split_over_all_multiprocessors(num_rows, expected):
    for num_tokens, chosen in zip((1, 9, 32, 64), (expected[0], *expected), strict=True):
        tiles = tiles_of(num_tokens, num_rows, may_split=True)
        assert (tiles.groups, tiles.splits, tiles.num_stages) == chosen
        assert tiles_of(num_tokens, num_rows).splits == 1


@pytest.mark.parametrize(
    ("num_tokens", "size", "splits"),
    [
        *((128, (5120, 25600), 3), (128, (2560, 9728), 3), (192, (5120, 25600), 1)),
        *((192, (2560, 9728), 1), (256, (2560, 9728), 3), (130, (2560, 9728), 1)),
        *((128, (4096, 14336), 1), (128, (8192, 28672), 1), (512, (5120, 25600), 1)),
    ],
)
def test_sums_of_more_tokens_are_split_where_waves_of_tiles_leave_gaps(num_tokens, size, splits):
    tiles = tiles_of(num_tokens, *size, may_split=True)
    assert getattr(tiles, "splits", 1) == splits


def test_a_group_has_tiles_of_its_own_where_that_saves_short_inputs_a_wave():
    for num_tokens, size in ((160, (3584, 3584)), (256, (3072, 3072)), (384, (2048, 6144))):
        tiles = tiles_of(num_tokens, *size, may_split=True)
        assert isinstance(tiles, MatrixTiles)
        assert (tiles.groups, tiles.splits) == (1, 1)
    assert tiles_of(256, 5120, 25600, may_split=True).groups == 2


def test_more_waves_of_pairs_are_not_worth_their_starts():
    for size in ((3072, 3072), (3072, 8192), (2880, 4096)):
        tiles = tiles_of(700, *size, may_split=True)
        assert isinstance(tiles, PackedTiles)
        assert (tiles.tokens, tiles.groups) == (128, 3)
    assert isinstance(tiles_of(700, 1536, 1152), PackedTiles)


def test_long_sums_that_fill_half_of_the_multiprocessors_are_split_finer():
    for num_rows, num_inputs, splits in (
        (5120, 25600, 6), (5120, 8192, 1), (4096, 25600, 2), (6144, 25600, 1),
    ):  # fmt: skip
        for num_tokens in (1, 16):
            assert tiles_of(num_tokens, num_rows, num_inputs, may_split=True).splits == splits
    assert tiles_of(17, 5120, 25600, may_split=True).splits == 3


@pytest.mark.parametrize(
    ("num_rows", "stages"),
    [(6144, [4, 4, 4]), (12288, [4, 4, 4]), (28672, [4, 3, 2]), (57344, [4, 2, 2])],
)
def test_gated_tiles_run_at_once_if_their_rings_leave_room(num_rows, stages):
    for num_tokens, each in zip((8, 16, 32), stages, strict=True):
        assert tiles_of(num_tokens, num_rows, is_gated=True).num_stages == each


def test_gated_tiles_of_8_bits_halve_their_inputs_where_that_lets_all_run_at_once():
    for num_rows, expected in ((12288, (256, 3)), (28672, (128, 3)), (57344, (256, 2))):
        tiles = tiles_of(32, num_rows, num_bits=8, is_gated=True)
        assert (tiles.columns, tiles.num_stages) == expected


@pytest.mark.parametrize(
    "options", [{}, {"may_split": True}, {"is_gated": True}], ids=["whole", "split", "gated"]
)
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("num_rows", [512, 1024, 2560, 4096, 5120, 9728, 28672, 151936])
def test_tiles_are_those_of_a_step_before_serving_of_no_more_tokens(num_rows, num_bits, options):
    options = {"num_bits": num_bits, **options}
    for num_tokens in (*range(65, 2200), 4096, 8192, 16384):
        tiles = tiles_of(num_tokens, num_rows, **options)
        # The largest step is run, too, which has as many tiles of 128 tokens or more.
        fitting = [each for each in (64, *BUILT_TOKENS) if each < num_tokens + 128]
        assert tiles in [tiles_of(each, num_rows, **options) for each in fitting]


def test_other_weights_are_unpacked_first():
    assert tiles_of(100, 4096, dtype=torch.float16) is None
    assert tiles_of(100, 4096, 1056, group=96) is None
    assert tiles_of(100, 4096, 1056, group=1056) is not None
    assert tiles_of(100, 4096, 4096, group=256) is not None


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_in_batch_invariant_mode_sums_do_not_depend_on_the_tokens(size):
    options = {"group": 128, "dtype": torch.bfloat16, "device": CUDA}
    orders = set()
    for num_tokens in (1, 2, 9, 17, 33, 64, 65, 640, 8192):
        tiles = invariant_packed_tiles(num_tokens, *size, **options)
        orders.add((tiles.columns, tiles.groups, tiles.splits))
        stage_bytes = (tiles.rows // 4 + tiles.tokens) * tiles.columns * 2 + 8
        assert stage_bytes * tiles.num_stages <= SHARED_BYTES
    assert len(orders) == 1
    odd = {**options, "group": 96}
    assert {invariant_packed_tiles(count, 4096, 1056, **odd) for count in (1, 700)} == {None}
