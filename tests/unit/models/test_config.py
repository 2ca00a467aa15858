import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from models.config import ConfigError, ModelConfig, RopeConfig
from models.config_sections.families import FAMILIES_WITHOUT_WINDOWS
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


def test_cache_entries_are_numbered_in_layer_order_attention_first(tmp_path):
    plain = read(tmp_path, num_hidden_layers=4, sliding_window=8, layer_types=[
        "full_attention", "sliding_attention", "full_attention", "sliding_attention"
    ])  # fmt: skip
    assert plain.cache_windows == (None, 8, None, 8)
    assert plain.entry_layers == (0, 1, 2, 3)
    assert [plain.cache_index(layer) for layer in range(6)] == [0, 1, 2, 3, 4, 5]
    mixed = replace(plain, mixers=("state", "both", "none", "attention"))
    assert mixed.cache_windows == ("state", 8, "state", 8)
    assert mixed.entry_layers == (0, 1, 1, 3)
    assert mixed.cache_index(0, "state") == 0
    assert [mixed.cache_index(1, part) for part in ("attention", "state")] == [1, 2]
    assert mixed.cache_index(3) == 3
    assert [mixed.cache_index(layer) for layer in (4, 5)] == [4, 5]
    with pytest.raises(ValueError, match="not in list"):
        mixed.cache_index(2)


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


def test_gpt_oss_is_of_bfloat16_as_its_file_names_no_dtype(tmp_path):
    gpt_oss = {"architectures": ["GptOssForCausalLM"], "sliding_window": 128}
    assert read(tmp_path, **gpt_oss).dtype == "bfloat16"
    assert read(tmp_path, **gpt_oss, torch_dtype="float16").dtype == "float16"


@pytest.mark.parametrize("is_stated", [False, True])
def test_formats_of_single_layers_may_be_in_modelopts_own_file(tmp_path, is_stated):
    layers = {
        kind: {f"model.layers.0.mlp.{name}": {"quant_algo": kind} for name in ("up_proj", "o_proj")}
        for kind in ("FP8", "NVFP4")
    }
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers["NVFP4"]}
    own = {"producer": {"name": "modelopt"}, "quantization": mixed}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    stated = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]}
    if is_stated:
        stated["quantized_layers"] = layers["FP8"]
    config = read(tmp_path, quantization_config=stated).quantization
    assert config.kinds == {"fp8" if is_stated else "nvfp4"}
    assert config.scheme_of("model.layers.1.mlp.up_proj") is None


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
        ("eos_token_id", True),
        ("eos_token_id", [2, False]),
        ("eos_token_id", 2.0),
        ("hidden_act", "gelu"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "chunked_attention"]),
        ("quantization_config", "fp8"),
        ("rope_scaling", "linear"),
        ("rope_scaling", False),
        ("partial_rotary_factor", 1.5),
        ("is_causal", False),
    ],
)
def test_wrong_field_is_named_with_its_file_and_value(tmp_path, name, value):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **{name: value})
    message = str(caught.value)
    assert str(tmp_path / "config.json") in message
    assert f"{name} is {value!r}" in message


def test_unsupported_rope_type_is_named_with_those_supported(tmp_path):
    with pytest.raises(ConfigError, match=r"rope_parameters\.rope_type is 'axial'.*llama3"):
        read(tmp_path, rope_parameters={"rope_type": "axial", "factor": 2.0})


def test_missing_scaling_field_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"rope_scaling\.factor is None"):
        read(tmp_path, rope_scaling={"rope_type": "linear"})


def test_heads_that_do_not_divide_the_hidden_size_need_a_head_dim(tmp_path):
    with pytest.raises(ConfigError, match="head_dim"):
        read(tmp_path, num_attention_heads=5)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MOE = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "hidden_size": 63,
}


def test_yarn_stretches_by_the_ratio_of_lengths_when_no_factor_is_given(tmp_path):
    rope = read(tmp_path, rope_parameters={**YARN, "factor": None}).rope
    assert rope.factor == 256 / 64
    assert rope.table_scale == pytest.approx(0.1 * math.log(4) + 1)
    assert rope.score_scale == 1.0


def test_an_mscale_that_is_no_number_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="mscale is False; it must be 0 or a positive number"):
        read(tmp_path, rope_parameters={**YARN, "mscale": False})


def test_mscales_of_yarn_are_shared_out_between_table_and_scores(tmp_path):
    rope = read(tmp_path, rope_parameters={**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}).rope
    assert rope.table_scale == pytest.approx((0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    assert rope.score_scale == pytest.approx((0.1 * math.log(4) + 1) ** 2)


def test_dynamic_scaling_does_nothing_within_the_longest_sequence(tmp_path):
    dynamic = read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}).rope
    assert dynamic == RopeConfig(theta=10000.0)


def test_a_scaling_that_was_added_to_a_newer_file_counts(tmp_path):
    newer = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 1e5}
    assert read(tmp_path, **newer).rope == RopeConfig(theta=5e5)
    assert read(tmp_path, **newer, rope_scaling={}).rope == RopeConfig(theta=5e5)
    rope = read(tmp_path, **newer, rope_scaling={"rope_type": "linear", "factor": 2.0}).rope
    assert rope == RopeConfig(theta=1e5, rope_type="linear", factor=2.0)


def test_a_scaling_that_was_added_to_gemma_3_is_that_of_layers_without_a_window(tmp_path):
    full = {"rope_type": "default", "rope_theta": 5e5}
    config = read(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        rope_parameters={"full_attention": full, "sliding_attention": {"rope_theta": 300.0}},
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert config.rope == RopeConfig(theta=5e5, rope_type="linear", factor=8.0)
    assert config.local_rope == RopeConfig(theta=300.0)


@pytest.mark.parametrize("scaling", [YARN, {"rope_type": "llama3", **LLAMA3}])
def test_the_original_context_is_that_of_the_model_where_scaling_says_none(tmp_path, scaling):
    name = "original_max_position_embeddings"
    silent = {**scaling, name: None}
    assert getattr(read(tmp_path, rope_scaling=silent).rope, name) == 256
    assert getattr(read(tmp_path, rope_scaling=scaling, **{name: 16}).rope, name) == 16


def test_rope_of_each_layer_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="it must be one for all layers"):
        read(tmp_path, rope_parameters={"full_attention": {"rope_theta": 1e4}})


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": None}, (None, None)),
        ({"sliding_window": 7}, (7, 7)),
        ({"sliding_window": 7, "use_sliding_window": False}, (None, None)),
        ({"sliding_window": 7, "use_sliding_window": True}, (7, 7)),
        (
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
            (None, 7),
        ),
        (
            {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
            (None, 7),
        ),
        ({"sliding_window": 7, "sliding_window_pattern": 2}, (7, None)),
        ({"sliding_window": 7, "architectures": ["GptOssForCausalLM"]}, (7, None)),
        ({"architectures": ["GptOssForCausalLM"]}, (128, None)),
        ({"sliding_window": 7, "architectures": ["MiniMaxForCausalLM"]}, (7, 7)),
        ({"sliding_window": 7, "architectures": ["Qwen3ForCausalLM"]}, (None, None)),
        ({"sliding_window": 7, "architectures": ["Qwen3MoeForCausalLM"]}, (None, None)),
    ],
)
def test_windows_are_read_in_the_words_of_each_family(tmp_path, changes, windows):
    changes = {"architectures": ["MistralForCausalLM"], **changes}
    assert read(tmp_path, **changes).sliding_windows == windows


@pytest.mark.parametrize("used", [{}, {"use_sliding_window": True}])
@pytest.mark.parametrize("architecture", FAMILIES_WITHOUT_WINDOWS)
def test_families_without_windows_see_all_keys(tmp_path, architecture, used):
    config = read(tmp_path, architectures=[architecture], sliding_window=7, **used)
    assert config.sliding_windows == (None, None)


@pytest.mark.parametrize("name", ["n_routed_experts", "num_local_experts", "num_experts"])
def test_experts_are_counted_under_each_of_their_names(tmp_path, name):
    changes = {**MOE, "num_local_experts": None, name: 6}
    moe = read(tmp_path, **changes).moe
    assert (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size) == (6, 2, 24)
    assert (moe.n_group, moe.topk_group, moe.shared_size) == (1, 1, 0)


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, set()),
        ({"first_k_dense_replace": 2}, {0, 1}),
        ({"decoder_sparse_step": 2}, {0, 2}),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, {0, 2, 3}),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}, {1, 3}),
    ],
)
def test_layers_without_experts(tmp_path, changes, dense):
    assert read(tmp_path, **MOE, num_hidden_layers=4, **changes).moe.dense_layers == dense


def test_families_fill_in_what_their_files_leave_unsaid(tmp_path):
    mixtral = read(tmp_path, **MOE, architectures=["MixtralForCausalLM"])
    assert mixtral.moe.norm_topk_prob
    assert mixtral.rope.theta == 1e6
    glm = read(tmp_path, **MOE, architectures=["Glm4MoeForCausalLM"], attention_bias=True)
    assert glm.moe.scoring_func == "sigmoid"
    assert glm.rope.partial_rotary_factor == 0.5
    assert glm.attention_bias
    assert not glm.attention_output_bias
    deepseek = read(tmp_path, **MOE, **MLA, architectures=["DeepseekV3ForCausalLM"])
    assert deepseek.rope.is_interleaved
    assert deepseek.head_dim == 8
    assert deepseek.mla.q_lora_rank is None
    assert deepseek.moe.routed_scaling_factor == 2.5
    gpt_oss = read(tmp_path, architectures=["GptOssForCausalLM"])
    assert (gpt_oss.rope.theta, gpt_oss.rope.rope_type, gpt_oss.rope.factor) == (15e4, "yarn", 32)
    dense = read(tmp_path)
    assert dense.moe is None
    assert dense.mla is None


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"n_group": 3}, "num_local_experts"),
        ({"n_group": 2, "topk_group": 3}, "topk_group"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({"n_group": 8, "scoring_func": "sigmoid", "num_experts_per_tok": 1}, "n_group"),
        ({"scoring_func": "relu"}, "scoring_func"),
        ({"topk_method": "greedy", "norm_topk_prob": True}, "norm_topk_prob"),
        ({"topk_method": True}, "topk_method"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({**MLA, "v_head_dim": None}, "v_head_dim"),
        ({**MLA, "index_topk": 5}, "q_lora_rank"),
        ({**MLA, "q_lora_rank": 9, "index_topk": 5, "index_head_dim": 6}, "index_head_dim"),
        ({**MLA, "qk_rope_head_dim": 7}, "qk_rope_head_dim"),
    ],
)
def test_wrong_field_of_a_family_is_named(tmp_path, changes, name):
    with pytest.raises(ConfigError, match=rf"config\.json: {name} is "):
        read(tmp_path, **{**MOE, **changes})


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_file_that_is_no_json_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_pipe_instead_of_the_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        ModelConfig.from_folder(tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        ModelConfig.from_folder(tmp_path)


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(
        UnsupportedArchitectureError,
        match=r"'MambaForCausalLM'.*LlamaForCausalLM, .*Qwen3ForCausalLM",
    ):
        model_class("MambaForCausalLM")


LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1, 3]}
GEMMA = {"hidden_act": None, "num_hidden_layers": 7, "head_dim": 10}


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope_has_factors_of_each_pair_and_the_scale_of_phi3(tmp_path, name):
    config = read(
        tmp_path,
        architectures=["Phi3ForCausalLM"],
        rope_scaling={**LONGROPE, "type": name},
        partial_rotary_factor=0.25,
        original_max_position_embeddings=64,
    )
    assert config.rope.short_factors == (1.0, 1.5)
    assert config.rope.long_factors == (1.0, 3.0)
    assert config.rope.longest == 256
    assert config.rope.table_scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    assert config.with_longest(64).rope.longest == 64


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([1.0], r"short_factor is \[1.0\]; it must be a list of 8 positive numbers"),
        ([1.0] * 7 + [-1], r"short_factor\[7\] is -1; it must be a positive number"),
        (None, "short_factor is None"),
    ],
)
def test_factors_of_longrope_are_checked(tmp_path, factors, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, rope_scaling={**LONGROPE, "short_factor": factors})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None},
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "default"}}},
    ],
)
def test_gemma3_rotates_layers_with_windows_by_themselves(tmp_path, changes):
    config = read(tmp_path, **GEMMA, architectures=["Gemma3ForCausalLM"], **changes)
    assert config.rope == RopeConfig(theta=1e6)
    assert config.local_rope == RopeConfig(theta=1e4)
    assert config.sliding_windows == (4096,) * 5 + (None, 4096)
    assert config.norm_offset == 1.0
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("architecture", "changes", "caps"),
    [
        ("Gemma2ForCausalLM", {}, (50.0, 30.0)),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": None}, (0.0, 30.0)),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": None}, (50.0, 0.0)),
        ("Gemma3ForCausalLM", {}, (0.0, 0.0)),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 7}, (0.0, 7.0)),
        ("LlamaForCausalLM", {"attn_logit_softcapping": 7}, (0.0, 0.0)),
    ],
)
def test_caps_are_off_where_null_and_a_default_where_absent(tmp_path, architecture, changes, caps):
    multipliers = read(tmp_path, architectures=[architecture], **changes).multipliers
    assert (multipliers.attention_cap, multipliers.logits_cap) == caps


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        ("Gemma2ForCausalLM", "hidden_activation", "gelu"),
        ("Gemma2ForCausalLM", "attn_logit_softcapping", -1),
        ("Gemma2ForCausalLM", "use_bidirectional_attention", True),
        ("Gemma3ForCausalLM", "use_bidirectional_attention", "all"),
        ("Gemma3ForCausalLM", "attn_logit_softcapping", 50.0),
        ("GraniteForCausalLM", "residual_multiplier", 0),
        ("GraniteForCausalLM", "logits_scaling", "8"),
        ("Gemma3ForConditionalGeneration", "text_config", 3),
    ],
)
def test_wrong_field_of_a_scaled_family_is_named(tmp_path, architecture, name, value):
    with pytest.raises(ConfigError, match=rf"config\.json: {name} is {value!r}"):
        read(tmp_path, architectures=[architecture], **{name: value})


def test_text_part_of_a_model_of_several_parts_is_read(tmp_path):
    config = read(
        tmp_path,
        architectures=["Gemma3ForConditionalGeneration"],
        text_config={"hidden_size": 20, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        vision_config={"hidden_size": 7},
        eos_token_id=[1, 106],
    )
    assert config.hidden_size == 20
    assert config.rope.factor == 8.0
    assert config.eos_token_ids == (1, 106)
