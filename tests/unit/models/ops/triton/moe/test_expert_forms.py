import pytest

from models.ops.triton.moe.expert_forms import are_few, first_tokens_of_each_form, tile_rows


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (32, 4), (128, 8), (256, 8), (7, 7)])
def test_a_form_begins_where_the_list_says(num_experts, top_k):
    def form(num_tokens):
        num_pairs = num_tokens * top_k
        return are_few(num_pairs, num_experts, top_k), tile_rows(num_pairs, num_experts)

    changes = [count for count in range(2, 5000) if form(count) != form(count - 1)]
    assert first_tokens_of_each_form(num_experts, top_k) == [1, *changes]


def test_tiles_are_twice_as_high_as_an_expert_has_rows_on_average():
    assert [tile_rows(num_pairs, 10) for num_pairs in (1, 80, 81, 160, 161, 320, 321, 10**6)] == [
        16, 16, 32, 32, 64, 64, 128, 128,
    ]  # fmt: skip


def test_a_token_alone_is_computed_pair_by_pair_whatever_its_experts():
    assert are_few(8, 8, 8)
    assert not are_few(16, 8, 8)
