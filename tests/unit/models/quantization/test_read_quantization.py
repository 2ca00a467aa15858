"""quantization_config of every tool: read, matched with modules, or refused by name."""

import pytest

from models.quantization.config import QuantizationConfig, QuantizationError, WeightScheme
from models.quantization.read import read_quantization

WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
}
ROUND_FP8 = {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": -1}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
QUARK = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}


def compressed(weights, activations=None, **fields):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **fields}


def quark_int4(pack_method="reorder", inputs=None, **fields):
    weight = {"dtype": "int4", "qscheme": "per_group", "group_size": 128} | fields
    layers = {"weight": weight, "input_tensors": inputs}
    export = {"pack_method": pack_method}
    return {"quant_method": "quark", "global_quant_config": layers, "export": export}


@pytest.mark.parametrize(
    ("fields", "described", "ignored"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 64]},
            "fp8 blocks of 128 x 64",
            (),
        ),
        ({"quant_method": "fp8", "modules_to_not_convert": ["gate"]}, "fp8 rows", ("gate",)),
        ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, "fp8 rows", ("lm_head",)),
        ({"quant_method": "fbgemm_fp8"}, "fp8 rows", ()),
        (compressed(WEIGHTS, ignore=["lm_head"]), "fp8 rows", ("lm_head",)),
        (compressed(WEIGHTS | {"strategy": "tensor"}), "fp8 rows", ()),
        (compressed(WEIGHTS, kv_cache_scheme=WEIGHTS), "fp8 rows", ()),
        (compressed(WEIGHTS, kv_cache_scheme={"num_bits": 8, "type": "int"}), "fp8 rows", ()),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, "fp8 rows", ()),
        (MODELOPT | {"kv_cache_quant_algo": "NVFP4"}, "fp8 rows", ()),
        ({"quant_method": "fp8", "fmt": None, "activation_scheme": None}, "fp8 rows", ()),
        (
            compressed(WEIGHTS | {"strategy": "block", "block_structure": [64, 128]}),
            "fp8 blocks of 64 x 128",
            (),
        ),
        (compressed(INT4), "int4 groups of 32", ()),
        (compressed(INT4) | {"quant_method": "compressed_tensors"}, "int4 groups of 32", ()),
        (compressed(INT4 | {"symmetric": False}), "int4 groups of 32, zero points", ()),
        (compressed(INT4 | {"actorder": "group"}), "int4 groups of 32, ordered", ()),
        (compressed(INT4 | {"actorder": "weight"}), "int4 groups of 32", ()),
        (compressed(INT4 | {"strategy": "channel", "num_bits": 8}), "int8 rows", ()),
        (compressed(FP4, FP4), "nvfp4", ()),
        (compressed(FP4 | {"group_size": 32}), "mxfp4", ()),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["a", "b"]}, "mxfp4", ("a", "b")),
        (AWQ, "int4 groups of 128, zero points", ()),
        (AWQ | {"zero_point": False, "version": "GEMM"}, "int4 groups of 128", ()),
        (AWQ | {"version": None}, "int4 groups of 128, zero points", ()),
        (GPTQ, "int4 groups of 128", ()),
        (GPTQ | {"desc_act": True, "bits": 8}, "int8 groups of 128, ordered", ()),
        (GPTQ | {"group_size": -1, "sym": False}, "int4 rows, zero points", ()),
        (GPTQ | {"checkpoint_format": "gptq_v2", "format": "gptq_v2"}, "int4 groups of 128", ()),
        (
            AWQ | {"checkpoint_format": "gemm", "format": "gemm"},
            "int4 groups of 128, zero points",
            (),
        ),
        (MODELOPT, "fp8 rows", ()),
        (MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}, "nvfp4", ()),
        ({"quant_method": "quark", "global_quant_config": QUARK}, "mxfp4", ()),
        (quark_int4(dtype="uint4", symmetric=False), "int4 groups of 128, zero points", ()),
        (quark_int4(), "int4 groups of 128", ()),
        (AWQ | {"pack_method": "reorder"}, "int4 groups of 128, zero points", ()),
        ({"quant_method": "mxfp8", "ignored_layers": ["a"]}, "fp8 blocks of 1 x 32", ("a",)),
        (MODELOPT | {"quant_algo": "MXFP8", "group_size": 32}, "fp8 blocks of 1 x 32", ()),
        (ROUND_FP8, "fp8 rows", ()),
        (ROUND_FP8 | {"group_size": [128, 128]}, "fp8 blocks of 128 x 128", ()),
        (ROUND_FP8 | {"data_type": "mx_fp", "group_size": 32}, "fp8 blocks of 1 x 32", ()),
        (ROUND_FP8 | {"data_type": "mx_fp", "group_size": 32, "bits": 4}, "mxfp4", ()),
        (ROUND_FP8 | {"data_type": "nv_fp", "group_size": 16, "bits": 4}, "nvfp4", ()),
    ],
)
def test_every_supported_form_is_read(fields, described, ignored):
    config = read_quantization(fields)
    assert config.method in ("fp8", fields["quant_method"].replace("_t", "-t"))
    assert config.schemes[0].describe() == described
    assert config.ignored == ignored


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 4, "group_size": 64}, r"quant_method is None; .* \(MLX checkpoints name none\)"),
        *(
            ({"quant_method": name}, f"quant_method is '{name}'; it must be one of fp8, fbgemm")
            for name in ("bitsandbytes", "aqlm", "hqq", "exl2", "torchao", "quip", "eetq")
        ),
        ({"quant_method": "gguf", "types": ["Q4_1"]}, r"types is \['Q4_1'\]"),
        ({"quant_method": ["fp8"]}, r"quant_method is \['fp8'\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "fmt": False}, "fmt is False"),
        ({"quant_method": "fp8", "activation_scheme": False}, "activation_scheme is False"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128"),
        ({"quant_method": "fp8", "weight_block_size": [True, 1]}, "weight_block_size is"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "a list of module names"),
        ({"quant_method": "fp8", "activation_scheme": 1}, "activation_scheme is 1"),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [1, 1]},
            "activation_scheme is 'static'; it must be dynamic",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups is None"),
        (compressed(None), r"config_groups\.group_0\.weights is None"),
        (compressed(WEIGHTS | {"num_bits": 3, "type": "int"}), r"\('int', 3\)"),
        (compressed(INT4 | {"group_size": 0}), "weights.group_size is 0"),
        (compressed(INT4 | {"strategy": "block"}), "strategy is 'block'"),
        (compressed(FP4 | {"group_size": 64}), r"group_size is 64; it must be 16 \(NVFP4\)"),
        (
            compressed(INT4 | {"num_bits": 8}, {"num_bits": 4, "type": "int"}),
            r"input_activations.type and num_bits is \('int', 4\)",
        ),
        (compressed(WEIGHTS | {"strategy": "block"}), "block_structure is None"),
        (compressed(WEIGHTS, format="marlin-24"), "format is 'marlin-24'"),
        (compressed(WEIGHTS, sparsity_config={"format": "sparse-bitmask"}), "sparsity_config"),
        (compressed(WEIGHTS, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        *(
            (compressed(WEIGHTS, ignore=[f"re:{expression}"]), "a regular expression")
            for expression in ("(", "(" * 5000 + ")" * 5000, f"a{{{10**20}}}")
        ),
        (compressed(WEIGHTS | {"num_bits": 8.0}), r"type and num_bits is \('float', 8.0\)"),
        (compressed(FP4 | {"group_size": 16.0}), "group_size is 16.0"),
        (compressed(INT4 | {"actorder": 1}), "actorder is 1"),
        (compressed(INT4 | {"actorder": "rows"}), "actorder is 'rows'"),
        (compressed(WEIGHTS, format=["dense"]), r"format is \['dense'\]"),
        (compressed({"type": {}, "num_bits": []}), r"type and num_bits is \({}, \[\]\)"),
        (compressed(WEIGHTS, {"type": "int", "num_bits": [8]}), r"num_bits is \('int', \[8\]\)"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; it must be gemm"),
        (AWQ | {"version": False}, "version is False; it must be gemm"),
        (AWQ | {"bits": 8}, "bits is 8; it must be 4"),
        (AWQ | {"group_size": None}, "group_size is None"),
        (GPTQ | {"bits": 3}, "bits is 3; it must be 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"format": "bitblas"}, "format is 'bitblas'; it must be one of gptq, gptq_v2"),
        (GPTQ | {"checkpoint_format": ["gptq"]}, r"checkpoint_format is \['gptq'\]"),
        (GPTQ | {"checkpoint_format": False}, "checkpoint_format is False"),
        (GPTQ | {"is_marlin_format": 0}, "is_marlin_format is 0"),
        (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, "format is 'gptq_v2'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True"),
        (AWQ | {"format": "gemv_fast"}, "format is 'gemv_fast'; it must be gemm"),
        (ROUND | {"packing_format": False}, "packing_format is False"),
        (ROUND | {"data_type": 1}, "data_type is 1"),
        (ROUND | {"packing_format": 4}, "packing_format is 4; it must be one of auto, auto_round:"),
        (ROUND | {"packing_format": None, "backend": "auto_round:marlin"}, "backend is 'auto"),
        (ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format is"),
        (ROUND | {"data_type": "mx_int"}, "data_type is 'mx_int'"),
        (ROUND | {"data_type": "mx_fp"}, "group_size is 128; it must be 32 for mx_fp"),
        (ROUND | {"data_type": "fp"}, "bits is 4; it must be another for fp"),
        (ROUND | {"data_type": "fp", "bits": 8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        (ROUND | {"extra_config": {"a": {"data_type": "mxfp"}}}, r"\['a'\].data_type is 'mxfp'"),
        (
            ROUND_FP8 | {"extra_config": {"a": {"data_type": "int", "bits": 4}}},
            r"\['a'\].data_type is 'int'; it must be that of floats",
        ),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, "weight_block_size is"),
        (ROUND | {"act_bits": 8}, "act_bits is 8"),
        (ROUND | {"bits": 2}, "bits is 2"),
        (ROUND | {"extra_config": {"(": {"bits": 8}}}, r"extra_config\['\('\]"),
        (ROUND | {"extra_config": {"a": 8}}, r"extra_config\['a'\] is 8"),
        (
            ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {"a": {"bits": 8}}},
            "4 in every layer",
        ),
        (GPTQ | {"dynamic": {"+:(": {}}}, "dynamic is"),
        (GPTQ | {"dynamic": {"+:a": {"bits": 2}}}, r"dynamic\['\+:a'\].bits is 2"),
        (MODELOPT | {"quant_algo": "NVFP4", "group_size": 16.0}, "group_size is 16.0"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (quark_int4(None), r"export.pack_method is None; it must be one of reorder, order"),
        (quark_int4("other"), "export.pack_method is 'other'"),
        (quark_int4(qscheme="per_channel"), r"dtype and qscheme is \('int4', 'per_channel'\)"),
        (quark_int4(ch_axis=0), "weight.ch_axis is 0"),
        (quark_int4(zero_point_type="float32"), "weight.zero_point_type is 'float32'"),
        (quark_int4(inputs={"dtype": "int4"}), "input_tensors.dtype is 'int4'"),
        (AWQ | {"pack_method": "order"}, "pack_method is 'order'; it must be one of reorder"),
        (AWQ | {"pack_method": "reorder", "zero_point": False}, "true with pack_method"),
        ({"quant_method": "quark", "global_quant_config": {}}, "global_quant_config.weight"),
        *(
            (
                {"quant_method": "quark", "global_quant_config": QUARK, "algo_config": algorithms},
                r"algo_config\.(r4|online_r1_rotation) is True; .* are not rotated",
            )
            for algorithms in (
                [{"name": "rotation", "r1": True, "r4": True}],
                {"name": "rotation", "online_r1_rotation": True},
            )
        ),
    ],
)
def test_what_cannot_be_read_is_named_with_its_value(fields, message):
    with pytest.raises(QuantizationError, match=message):
        read_quantization(fields)


def test_the_file_of_modelopt_names_the_layers_that_stay():
    config = read_quantization(
        {
            "producer": {"name": "modelopt"},
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": ["lm_head", "model.layers.0*", "*.router", "*gate", "*.vision"],
            },
        }
    )
    modules = [
        "lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.router",
        "model.layers.1.mlp.gate", "model.vision.layers.1.up_proj",
    ]  # fmt: skip
    assert [config.scheme_of(module) for module in modules] == [None] * 5
    for module in ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj"):
        assert config.scheme_of(module) is not None


def test_quark_leaves_layers_without_a_weight_and_those_of_expressions_alone():
    config = read_quantization(
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": None},
            "layer_quant_config": {"*.experts.*": QUARK, "*.experts.0.*": {"weight": None}},
            "exclude": ["re:model.layers.61.*", "re:.*mlp.gate$"],
            "algo_config": [{"name": "rotation", "r1": True, "r4": False}],
        }
    )
    ignored = ["3.self_attn.q_proj", "3.mlp.experts.0.up_proj", "61.mlp.experts.1.up_proj"]
    schemes = [config.scheme_of(f"model.layers.{name}") for name in ignored]
    assert schemes == [None, None, None]
    scheme = config.scheme_of("model.layers.3.mlp.experts.1.up_proj")
    assert scheme is not None
    assert scheme.kind == "mxfp4"


def test_layers_of_mixed_precision_have_their_own_formats():
    layers = {
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }
    layers["model.layers.2.mlp.experts"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    config = read_quantization(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    )
    names = ["0.mlp.up_proj", "1.mlp.up_proj", "2.mlp.up_proj", "2.mlp.experts.11.up_proj"]
    kinds = [config.scheme_of(f"model.layers.{name}") for name in names]
    assert [each and each.kind for each in kinds] == ["fp8", "nvfp4", None, "nvfp4"]


def test_a_target_that_names_a_module_wins_over_its_class():
    groups = {
        "all": {"targets": ["Linear"], "weights": WEIGHTS},
        "fused": {"targets": ["re:.*qkv_proj"], "weights": INT4},
        "one": {"targets": ["model.layers.1.mlp.up_proj"], "weights": FP4},
    }
    config = read_quantization({"quant_method": "compressed-tensors", "config_groups": groups})
    names = ["0.self_attn.q_proj", "0.self_attn.o_proj", "1.mlp.up_proj", "11.mlp.up_proj"]
    kinds = [config.scheme_of(f"model.layers.{name}").kind for name in names]
    assert kinds == ["int4", "fp8", "nvfp4", "fp8"]


def test_activations_that_no_product_rounds_are_named():
    integers = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    for activations, unrounded in ((None, ()), (FP4, ("fp4",)), (integers, ("int8",))):
        config = read_quantization(compressed(INT4 | {"num_bits": 8}, activations))
        assert config.unrounded_activations == unrounded


def test_groups_without_weights_describe_attention_alone():
    groups = {
        "attention": {"targets": ["LlamaAttention"], "input_activations": WEIGHTS},
        "linear": {"targets": ["Linear"], "weights": INT4},
    }
    config = read_quantization({"quant_method": "compressed-tensors", "config_groups": groups})
    assert [scheme.kind for scheme in config.schemes] == ["int4"]


def test_overrides_of_gptq_are_honoured():
    dynamic = {"-:.*lm_head": {}, "+:.*mlp": {"bits": 8, "group_size": 32}}
    config = read_quantization(GPTQ | {"dynamic": dynamic})
    assert config.scheme_of("lm_head") is None
    assert config.scheme_of("model.layers.0.mlp.up_proj").describe() == "int8 groups of 32"
    assert config.scheme_of("model.layers.0.self_attn.q_proj").describe() == "int4 groups of 128"


def test_a_convention_of_zero_points_in_either_field_of_gptq_is_read():
    for name in ("checkpoint_format", "format"):
        assert read_quantization(GPTQ | {name: "gptq_v2"}).schemes[0].zero_offset == 0
        assert read_quantization(GPTQ | {name: "gptq"}).schemes[0].zero_offset == 1


@pytest.mark.parametrize(
    ("names", "method", "offset"),
    [
        ({}, "gptq", 1),
        ({"packing_format": "auto_round:auto_gptq", "backend": "auto_round"}, "gptq", 1),
        ({"packing_format": "auto_round:gptqmodel"}, "gptq", 0),
        ({"packing_format": "auto_round:auto_awq"}, "awq", 0),
        ({"backend": "auto_round:gptq:exllamav2"}, "gptq", 1),
        ({"backend": "autoround:exllamav2"}, "gptq", 0),
    ],
)
def test_autoround_stores_weights_as_another_tool(names, method, offset):
    config = read_quantization(ROUND | {"packing_format": None, "sym": False} | names)
    assert config.method == method
    assert config.schemes[0].describe() == "int4 groups of 128, zero points"
    assert config.schemes[0].zero_offset == offset


def test_layers_of_autoround_have_their_own_settings():
    extra = {
        "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32},
        r".*self_attn\.[qk]_proj": {"sym": False},
        "lm_head": {"bits": 16, "data_type": "fp"},
        "shared_expert.*": {"bits": 16},
    }
    config = read_quantization(ROUND | {"extra_config": extra})
    described = {
        "model.layers.0.mlp.down_proj": "int8 groups of 32",
        "model.layers.1.mlp.down_proj": "int4 groups of 128",
        "model.layers.1.self_attn.k_proj": "int4 groups of 128, zero points",
        "model.layers.1.self_attn.o_proj": "int4 groups of 128",
    }
    for module, words in described.items():
        assert config.scheme_of(module).describe() == words
    for module in ("lm_head", "model.layers.1.mlp.shared_expert.up_proj"):
        assert config.scheme_of(module) is None


@pytest.mark.parametrize(
    ("pattern", "module", "is_ignored"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1.", "model.layers.1.mlp.up_proj", True),
        ("mlp.gate.", "model.layers.1.mlp.gate", True),
        ("mlp.gate.", "model.layers.1.mlp.gate_proj", False),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.k_proj", True),
        ("self_attn", "model.layers.3.self_attn.q_proj", True),
        ("re:.*gate$", "model.layers.0.mlp.gate", True),
        ("re:.*gate$", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_ignored_modules_are_found_by_name_and_by_expression(pattern, module, is_ignored):
    config = QuantizationConfig(
        method="fp8", schemes=(WeightScheme(kind="fp8"),), ignored=(pattern,)
    )
    assert config.ignores(module) is is_ignored


@pytest.mark.parametrize(
    ("fields", "is_assumed"),
    [
        ({}, False),
        ({"sym": False}, True),
        ({"dynamic": {"+:a": {"sym": False}}}, True),
        ({"sym": False, "meta": {"quantizer": ["gptqmodel:2.0.0"]}}, True),
        ({"sym": False, "checkpoint_format": "gptq"}, False),
        ({"sym": False, "format": "gptq_v2"}, False),
    ],
)
def test_zero_points_of_gptq_are_assumed_where_no_field_has_their_convention(fields, is_assumed):
    config = read_quantization(GPTQ | fields)
    assert config.assumes_zero_points is is_assumed
    assert {scheme.zero_offset for scheme in config.schemes} == {int("format" not in fields)}
