"""Fields of config.json of Llama 4, given and left out."""

import json

import pytest

from models.config import ConfigError, ModelConfig
from models.config_sections.rope import QueryScale

FIELDS = {
    "architectures": ["Llama4ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_local_experts": 3,
    "max_position_embeddings": 256,
}


@pytest.fixture
def read(tmp_path):
    """Returns a function that reads a config.json of these fields."""

    def read(**changes) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({**FIELDS, **changes}))
        return ModelConfig.from_folder(tmp_path)

    return read


def test_every_fourth_layer_sees_all_keys_without_positions(read):
    config = read()
    assert config.sliding_windows == (-8192, -8192, -8192, None, -8192)
    assert config.unrotated_layers == (3,)
    assert config.use_qk_norm
    assert config.rope.query_scale == QueryScale(rate=0.1, span=8192, is_of_unrotated=True)
    # The first files have an empty list, and numbers for flags.
    assert read(no_rope_layers=[], attn_temperature_tuning=4) == config


def test_kinds_of_layers_may_be_listed(read):
    config = read(no_rope_layers=[1, 0, 1, 1, 0], attention_chunk_size=16)
    assert config.sliding_windows == (-16, None, -16, -16, None)
    assert config.unrotated_layers == (1, 4)
    kinds = ["full_attention"] * 4 + ["chunked_attention"]
    config = read(layer_types=kinds, no_rope_layers=[1] * 5, attention_chunk_size=16)
    assert config.sliding_windows == (None,) * 4 + (-16,)
    assert config.unrotated_layers == ()


def test_parts_may_be_left_out(read):
    assert read(attention_chunk_size=None).sliding_windows == (None,) * 5
    assert read(attn_temperature_tuning=False).rope.query_scale is None
    assert not read(use_qk_norm=False).use_qk_norm


def test_experts_are_in_all_layers_or_in_some(read):
    config = read()
    assert config.intermediate_size == 128
    assert config.moe.intermediate_size == config.moe.shared_size == 96
    assert config.moe.scales_input
    assert config.moe.dense_layers == frozenset()
    assert read(interleave_moe_layer_step=2).moe.dense_layers == {0, 2, 4}
    assert read(moe_layers=[1, 2]).moe.dense_layers == {0, 3, 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2; it must be 1"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0; it must be a positive"),
        ({"layer_types": ["sliding_attention"] * 5}, "one of full_attention, chunked_attention"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is .* 0 or 1 for every layer"),
        ({"moe_layers": "all"}, "moe_layers is 'all'; it must be a list of layer numbers"),
    ],
)
def test_what_is_not_served_is_refused(read, changes, message):
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_other_families_have_no_chunks(read):
    with pytest.raises(ConfigError, match="layer_types"):
        read(architectures=["LlamaForCausalLM"], layer_types=["chunked_attention"] * 5)
