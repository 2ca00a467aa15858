import pytest

from models.config_sections.mla import IndexConfig, MlaConfig
from models.kernels.attention.latent import latent_forms
from models.kernels.attention.latent.latent_forms import (
    MOST_EXPANDED_BYTES,
    NEVER,
    keys_at_once,
    least_expanded_queries,
    steps_of_each_form,
)
from models.operands.latent_queries import LatentSizes

DEEPSEEK = LatentSizes(latent=512, rotated=64, plain=128, value=128)


def operations(sizes, num_queries, context):
    """Returns the arithmetic of a head in the absorbed and the expanded form."""
    latent, plain, value = sizes.latent, sizes.plain, sizes.value
    pairs = num_queries * (context + (num_queries + 1) / 2)
    projections = 2 * latent * (plain + value)
    absorbed = 2 * pairs * (2 * latent + sizes.rotated) + num_queries * projections
    expanded = 2 * pairs * (plain + sizes.rotated + value)
    return absorbed, expanded + (context + num_queries) * projections


@pytest.mark.parametrize(
    "sizes", [DEEPSEEK, LatentSizes(24, 8, 8, 8), LatentSizes(256, 32, 64, 128)], ids=str
)
def test_the_default_is_the_least_number_that_saves_arithmetic_after_any_context(sizes):
    least = least_expanded_queries(sizes)
    for context in (0, 1, 1000, 100_000):
        absorbed, expanded = operations(sizes, least, context)
        assert expanded <= absorbed
    absorbed, expanded = operations(sizes, least - 1, 10**9)
    assert expanded > absorbed


def test_deepseeks_long_prompts_take_a_third_of_the_arithmetic():
    absorbed, expanded = operations(DEEPSEEK, 8192, 32768)
    assert absorbed > 3 * expanded
    assert least_expanded_queries(DEEPSEEK) == 171


def test_heads_as_wide_as_the_latent_vector_are_never_expanded():
    assert least_expanded_queries(LatentSizes(64, 8, 64, 64)) == NEVER


def test_a_measured_number_takes_precedence(monkeypatch):
    monkeypatch.setattr(latent_forms, "_MEASURED", {DEEPSEEK: 320})
    assert least_expanded_queries(DEEPSEEK) == 320


@pytest.mark.parametrize("num_heads", [1, 16, 128])
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_pieces_are_whole_blocks_of_bounded_size(num_heads, block_size):
    keys = keys_at_once(DEEPSEEK, num_heads=num_heads, itemsize=2, block_size=block_size)
    assert keys % block_size == 0
    assert keys * num_heads * 256 * 2 <= MOST_EXPANDED_BYTES
    assert (keys + block_size) * num_heads * 256 * 2 > MOST_EXPANDED_BYTES


def test_a_piece_is_at_least_a_block():
    assert keys_at_once(DEEPSEEK, num_heads=10**6, itemsize=4, block_size=64) == 64


def test_warm_up_steps_take_both_forms():
    mla = MlaConfig(
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128,
    )  # fmt: skip
    assert steps_of_each_form(mla, 256) == [(171,), (170, 170)]


def test_warm_up_of_queries_that_choose_their_keys_takes_no_other_form():
    mla = MlaConfig(
        q_lora_rank=8, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        index=IndexConfig(num_heads=1, head_dim=64, top_k=4),
    )  # fmt: skip
    assert steps_of_each_form(mla, 256) == []
