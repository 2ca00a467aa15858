from dataclasses import replace

import pytest

from models.kernels.experts.expert_forms import (
    COMMON,
    OF_8_BITS,
    ON_CORES,
    are_few,
    first_tokens_of_each_form,
    tile_rows,
)
from models.kernels.experts.packed.expert_product import ProductShape
from models.kernels.experts.packed.matrix_experts import sorted_tiles
from models.kernels.tuning.hopper import EXPERTS, FEW_TOKEN_EXPERTS


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (32, 4), (128, 8), (256, 8), (7, 7)])
@pytest.mark.parametrize("others", [(), (ON_CORES,), (OF_8_BITS,), (ON_CORES, OF_8_BITS)])
def test_a_form_begins_where_the_list_says(num_experts, top_k, others):
    def form(num_tokens):
        num_pairs = num_tokens * top_k
        return [
            (
                are_few(num_pairs, num_experts, top_k, forms),
                tile_rows(num_pairs, num_experts, forms),
            )
            for forms in (COMMON, *others)
        ]

    changes = [count for count in range(2, 10_000) if form(count) != form(count - 1)]
    assert first_tokens_of_each_form(num_experts, top_k, *others) == [1, *changes]


def test_experts_of_4_bits_have_tiles_of_every_height():
    assert list(EXPERTS) == [rows for rows, _ in ON_CORES.heights]
    for rows, both in EXPERTS.items():
        assert max(tiles.tokens for tiles in both) == rows
    # Experts that have no room in these have those.
    assert FEW_TOKEN_EXPERTS.keys() < EXPERTS.keys()
    for rows, each in FEW_TOKEN_EXPERTS.items():
        assert {tiles.tokens for tiles in each} == {rows}


def test_few_inputs_take_short_tiles_of_more_tokens():
    sizes = {"num_experts": 8, "top_k": 2, "has_bias": False, "is_clamped": False}
    for rows, (gate_up, down) in EXPERTS.items():
        long = [
            ProductShape(num_outputs=4096, num_inputs=2048, is_gated=is_gated, **sizes)
            for is_gated in (True, False)
        ]
        assert [sorted_tiles(rows, each) for each in long] == [gate_up, down]
        short = replace(long[1], num_inputs=768)
        assert sorted_tiles(rows, short) == (down if rows < 64 else EXPERTS[64][1])


def test_tiles_are_as_high_as_an_expert_has_rows_on_average():
    assert [tile_rows(num_pairs, 10) for num_pairs in (1, 80, 81, 160, 161, 320, 321, 10**6)] == [
        16, 16, 32, 32, 64, 64, 128, 128,
    ]  # fmt: skip
    counts = (1, 40, 41, 80, 81, 160, 161, 640, 641, 1920, 1921, 10**6)
    assert [tile_rows(num_pairs, 10, ON_CORES) for num_pairs in counts] == [
        8, 8, 16, 16, 32, 32, 64, 64, 128, 128, 256, 256,
    ]  # fmt: skip


def test_a_token_alone_is_computed_pair_by_pair_whatever_its_experts():
    assert are_few(8, 8, 8)
    assert not are_few(16, 8, 8)
