import pytest

from models.quantization_config import QuantizationConfig, QuantizationError

WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def compressed(weights, **fields):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **fields}


@pytest.mark.parametrize(
    ("fields", "block_size", "ignored"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (128, 128), ()),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["gate"]},
            None,
            ("gate",),
        ),
        ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, None, ("lm_head",)),
        (compressed(WEIGHTS, ignore=["lm_head"]), None, ("lm_head",)),
        (compressed(WEIGHTS | {"strategy": "tensor"}), None, ()),
        (compressed(WEIGHTS, kv_cache_scheme=WEIGHTS), None, ()),
        (compressed(WEIGHTS | {"strategy": "block", "block_structure": [64, 128]}), (64, 128), ()),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["a", "b"]}, None, ("a", "b")),
    ],
)
def test_every_supported_form_is_read(fields, block_size, ignored):
    config = QuantizationConfig.from_fields(fields)
    assert config.method == fields["quant_method"]
    assert (config.block_size, config.ignored) == (block_size, ignored)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "quant_method is None"),
        ({"quant_method": "awq"}, "quant_method is 'awq'; it must be one of fp8, compressed"),
        ({"quant_method": ["fp8"]}, r"quant_method is \['fp8'\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128"),
        ({"quant_method": "fp8", "weight_block_size": [True, 1]}, "weight_block_size is"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "a list of module names"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None"),
        (compressed(None), r"config_groups\.group_0\.weights is None"),
        (compressed(WEIGHTS | {"num_bits": 4, "type": "int"}), r"\('int', 4\)"),
        (compressed(WEIGHTS | {"strategy": "group"}), "strategy is 'group'"),
        (compressed(WEIGHTS | {"strategy": "block"}), "block_structure is None"),
        (compressed(WEIGHTS, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(WEIGHTS, kv_cache_scheme="fp8"), "kv_cache_scheme is 'fp8'"),
        (compressed(WEIGHTS, ignore=["re:("]), "a regular expression"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_value(fields, message):
    with pytest.raises(QuantizationError, match=message):
        QuantizationConfig.from_fields(fields)


@pytest.mark.parametrize(
    ("pattern", "module", "is_ignored"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("self_attn", "model.layers.3.self_attn.q_proj", True),
        ("re:.*gate$", "model.layers.0.mlp.gate", True),
        ("re:.*gate$", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_ignored_modules_are_found_by_name_and_by_expression(pattern, module, is_ignored):
    config = QuantizationConfig(method="fp8", ignored=(pattern,))
    assert config.ignores(module) is is_ignored
