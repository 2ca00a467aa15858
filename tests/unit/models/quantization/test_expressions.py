"""Patterns that match names of modules, and expressions that would never come to an end."""

import itertools
from unittest.mock import Mock

import pytest

from models.config_sections.fields import ConfigError
from models.quantization import expressions
from models.quantization.expressions import MAX_EXPRESSION, Patterns, find_fault
from models.quantization.read import read_quantization

ENDLESS = "(?:a|aa)+$"
NAME = "a" * 200 + ".b"
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}


@pytest.mark.parametrize(
    ("pattern", "part", "end"),
    [
        ("mlp", True, False),
        (".mlp.", True, False),
        ("up_proj", True, True),
        ("0.mlp.up_proj", True, True),
        ("proj", False, False),
        ("*.mlp", True, True),
        ("*mlp*", True, True),
        ("model.*.up", False, False),
        ("re:.*mlp", True, True),
        (r"re:mlp", False, False),
        (r"re:^(?!.*lm_head).*\.(up|down)_proj$", True, True),
    ],
)
def test_patterns_cover_modules_by_part_or_by_end(pattern, part, end):
    module = "model.layers.0.mlp.up_proj"
    assert Patterns().match_part(pattern, module) is part
    assert Patterns().match_end(pattern, module) is end


def compressed(**fields):
    group = {"targets": ["Linear"], "weights": WEIGHTS, **fields.pop("group", {})}
    return {"quant_method": "compressed-tensors", "config_groups": {"0": group}, **fields}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    "fields",
    [
        compressed(ignore=[f"re:{ENDLESS}"]),
        compressed(group={"targets": [f"re:{ENDLESS}"]}),
        GPTQ | {"dynamic": {f"-:{ENDLESS}": {}}},
        GPTQ | {"dynamic": {ENDLESS: {"bits": 8}}},
        ROUND | {"extra_config": {ENDLESS: {"bits": 16}}},
        {"quant_method": "quark", "global_quant_config": None, "exclude": [f"re:{ENDLESS}"]}
        | {"layer_quant_config": {"x": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}},
    ],
)
def test_an_expression_without_end_is_an_error_that_names_it(monkeypatch, fields):
    monkeypatch.setattr(expressions, "MATCH_LIMIT_S", 0.01)
    config = read_quantization(fields)
    with pytest.raises(ConfigError, match=r"regular expression '.*\(\?:a\|aa\)\+\$.*' takes too"):
        config.scheme_of(NAME)


def test_many_slow_matches_are_an_error_that_names_the_slowest(monkeypatch):
    # Each match of the slow one takes half a minute, those of the other no time.
    times_s = (30 * time_s for n in itertools.count() for time_s in (n, n, n, n + 1))
    monkeypatch.setattr(expressions, "time", Mock(process_time=times_s.__next__))
    patterns = Patterns()

    def match_all():
        for number in range(100_000):
            patterns.match_part("re:model", f"model.{number}")
            patterns.match_part(f"re:{ENDLESS}", "a" * 22 + f".{number}")

    with pytest.raises(ConfigError, match=r"'\(\?:a\|aa\)\+\$' takes too long"):
        match_all()


@pytest.mark.parametrize("expression", ["(", "(?R)a", "a" * (MAX_EXPRESSION + 1)])
def test_a_text_that_is_no_expression_has_a_fault(expression):
    assert find_fault(expression)


def test_a_name_that_begins_like_an_expression_is_checked():
    weight = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    with pytest.raises(ValueError, match=r"layer_quant_config is '\('; it must be a regular"):
        read_quantization({"quant_method": "quark", "layer_quant_config": {"re:(": weight}})
    layers = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"re:(": {"quant_algo": "FP8"}}}
    with pytest.raises(ValueError, match=r"quantized_layers is '\('; it must be a regular"):
        read_quantization({"quant_method": "modelopt", **layers})
