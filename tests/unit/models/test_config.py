import json
from pathlib import Path

import pytest

from models.config import ConfigError, ModelConfig, RopeConfig
from models.registry import UnsupportedArchitectureError, model_class

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(folder: Path, **changes) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**MINIMAL, **changes}))
    return ModelConfig.from_folder(folder)


def test_absent_fields_take_the_defaults_of_the_format(tmp_path):
    config = read(tmp_path)
    assert config.num_key_value_heads == 4
    assert config.head_dim == 16
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.dtype == "float32"
    assert config.eos_token_ids == ()
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert not config.mlp_bias


def test_explicit_head_dim_wins_over_the_share_of_the_hidden_size(tmp_path):
    assert read(tmp_path, head_dim=40).head_dim == 40


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            RopeConfig(theta=5e5),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": None},
            RopeConfig(theta=5e5),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(theta=5e5, rope_type="linear", factor=2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, rope_type="llama3", **LLAMA3),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, rope_type="llama3", **LLAMA3),
        ),
    ],
)
def test_rope_is_read_from_newer_and_older_files(tmp_path, changes, rope):
    assert read(tmp_path, **changes).rope == rope


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_is_read_under_both_of_its_names(tmp_path, name):
    assert read(tmp_path, **{name: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(("value", "ids"), [(3, (3,)), ([3, 5], (3, 5)), (None, ())])
def test_end_token_may_be_one_many_or_none(tmp_path, value, ids):
    assert read(tmp_path, eos_token_id=value).eos_token_ids == ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", None),
        ("hidden_size", "64"),
        ("num_hidden_layers", 0),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", "small"),
        ("head_dim", 15),
        ("tie_word_embeddings", "yes"),
        ("architectures", []),
        ("architectures", "LlamaForCausalLM"),
        ("dtype", "float8"),
        ("eos_token_id", "</s>"),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", "fp8"),
        ("rope_scaling", "linear"),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_wrong_field_is_named_with_its_file_and_value(tmp_path, name, value):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **{name: value})
    message = str(caught.value)
    assert str(tmp_path / "config.json") in message
    assert f"{name} is {value!r}" in message


def test_unsupported_rope_type_is_named_with_those_supported(tmp_path):
    with pytest.raises(ConfigError, match=r"rope_parameters\.rope_type is 'yarn'.*llama3"):
        read(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 2.0})


def test_missing_scaling_field_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"rope_scaling\.factor is None"):
        read(tmp_path, rope_scaling={"rope_type": "linear"})


def test_heads_that_do_not_divide_the_hidden_size_need_a_head_dim(tmp_path):
    with pytest.raises(ConfigError, match="head_dim"):
        read(tmp_path, num_attention_heads=5)


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_file_that_is_no_json_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        ModelConfig.from_folder(tmp_path)


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(
        UnsupportedArchitectureError,
        match=r"'MambaForCausalLM'.*LlamaForCausalLM, Qwen3ForCausalLM",
    ):
        model_class("MambaForCausalLM")
