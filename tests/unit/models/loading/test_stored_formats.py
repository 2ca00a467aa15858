"""Every format of every tool loads with the values that its quantiser meant."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.loading.checkpoint import CheckpointError
from models.loading.loader import load_model
from models.parallel.group import ParallelGroup
from scripts.quantize_tiny import FORMATS, WEIGHTS, write_plain, write_quantized
from tests.support.quantized_checkpoints import WIDE
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
SHAPES = {
    "llama": WIDE,
    "llama_tied": WIDE,
    "llama_bias": WIDE,
    "qwen3_moe": WIDE | {"moe_intermediate_size": 128, "intermediate_size": 256},
    "mixtral": WIDE | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": WIDE
    | {"num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
       "qk_rope_head_dim": 64, "v_head_dim": 64, "moe_intermediate_size": 128,
       "num_hidden_layers": 2},
}  # fmt: skip
SOME = ("compressed-int4-zeros", "gptq-act-order", "awq", "modelopt-nvfp4", "quark-mxfp4",
        "compressed-mixed")  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Returns a function from a variant to its random checkpoint."""
    folders = {}

    def source(variant):
        if variant not in folders:
            folders[variant] = tmp_path_factory.mktemp(variant)
            write_checkpoint(folders[variant], variant, **SHAPES[variant])
        return folders[variant]

    return source


@pytest.fixture
def quantized(source, tmp_path):
    """Returns a function that writes a format; returns its folder and that of its values."""

    def quantized(variant, form):
        plain = write_quantized(source(variant), tmp_path / "stored", FORMATS[form])
        write_plain(source(variant), tmp_path / "plain", plain)
        return tmp_path / "stored", tmp_path / "plain"

    return quantized


def load(folder, **options):
    return load_model(folder, device=CPU, dtype=torch.float32, **options)


def assert_equal(model, expected):
    assert model.state_dict().keys() == expected.state_dict().keys()
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_has_its_values(quantized, form):
    stored, plain = quantized("llama", form)
    assert_equal(load(stored), load(plain))


def test_zero_points_of_awq_count_whatever_its_config_says(quantized):
    stored, plain = quantized("llama", "awq")
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"]["zero_point"] = False
    (stored / "config.json").write_text(json.dumps(config))
    assert_equal(load(stored), load(plain))


@pytest.mark.parametrize(
    ("variant", "form"),
    [
        *((variant, form) for variant in ("qwen3_moe", "deepseek_v3") for form in SOME),
        ("mixtral", "gptq-act-order"),
        ("llama_tied", "awq"),
        ("llama_bias", "gptq-act-order"),
    ],
)
def test_families_and_experts_have_their_values(quantized, variant, form):
    stored, plain = quantized(variant, form)
    assert_equal(load(stored), load(plain))


@pytest.mark.parametrize("form", SOME)
def test_ranks_get_their_shards(quantized, form):
    stored, plain = quantized("llama", form)
    for rank in range(2):
        group = ParallelGroup(rank=rank, size=2)
        assert_equal(load(stored, group=group), load(plain, group=group))


def test_float16_and_bfloat16_are_rounded_once(quantized):
    stored, plain = quantized("llama", "awq")
    for dtype in (torch.bfloat16, torch.float16):
        both = [load_model(each, device=CPU, dtype=dtype) for each in (stored, plain)]
        assert_equal(*both)


def edited(folder, **changes):
    """Replaces stored tensors by what functions make of them; None removes one."""
    tensors = load_file(folder / WEIGHTS)
    for part, change in changes.items():
        name = f"model.layers.1.mlp.down_proj.{part}"
        value = tensors.pop(name)
        if change is not None:
            tensors[name] = change(value).contiguous()
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("form", "part", "change", "message"),
    [
        ("awq", "qzeros", None, "qzeros is missing"),
        ("awq", "scales", lambda t: t[:-1], r"scales has shape \(5, 256\); it must be \(6, 256\)"),
        ("awq", "scales", lambda t: t.int(), "its scales is torch.int32; scales are floats"),
        ("awq", "qweight", lambda t: t[:-64], "scales has shape"),
        ("gptq", "scales", None, "scales is missing"),
        ("gptq-act-order", "g_idx", None, "g_idx is missing"),
        ("gptq-act-order", "g_idx", lambda t: t + 1, "g_idx has groups 1 to 6 of 6"),
        ("gptq", "bias", lambda t: t + 1, "the model has no tensor .*bias"),
        ("compressed-int4-32", "weight_shape", lambda t: t + 9, r"weight_shape is \[265, 393\]"),
        ("compressed-int4-zeros", "weight_zero_point", None, "weight_zero_point is missing"),
        ("compressed-int4-32", "weight_scale", lambda t: t * float("nan"), "NaN or infinity"),
        ("modelopt-nvfp4", "weight_scale_2", None, "weight_scale_2 is missing"),
        ("modelopt-nvfp4", "weight_scale", lambda t: t.float(), "it must be torch.float8_e4m3fn"),
        ("quark-mxfp4", "weight_scale", lambda t: t[:, :-1], r"has shape \(256, 11\)"),
        ("compressed-int8", "weight_scale", lambda t: t[:9], r"has shape \(9, 1\)"),
    ],
)  # fmt: skip
def test_damage_names_tensor_and_field(quantized, form, part, change, message):
    stored, _ = quantized("llama", form)
    edited(stored, **{part: change})
    with pytest.raises(CheckpointError, match=message) as caught:
        load(stored)
    assert "model.layers.1.mlp.down_proj" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        ("awq", {"group_size": 100}, "group_size 100 does not divide its 384 columns"),
        ("awq", {"quant_method": "gptq"}, "qzeros|qweight"),
        ("awq", {"quant_method": "fp8"}, "it is of AWQ or GPTQ; quant_method is fp8"),
        (
            "compressed-int4-32",
            {"quant_method": "fp8"},
            "it holds int4 or int8; quantization_config",
        ),
    ],
)
def test_a_configuration_that_contradicts_the_files_is_refused(quantized, form, fields, message):
    stored, _ = quantized("llama", form)
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] |= fields
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load(stored)


def test_a_scale_of_cached_keys_must_be_a_positive_number(quantized):
    stored, _ = quantized("llama", "compressed-fp8-channel")
    tensors = load_file(stored / WEIGHTS)
    tensors["model.layers.0.self_attn.k_scale"] *= 0
    save_file(tensors, stored / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"self_attn\.k_scale: a scale of cached keys"):
        load(stored)
