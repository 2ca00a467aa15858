"""A capture compares each fused operator with the operators it stands for."""

import re
from pathlib import Path

import pytest
import torch

from models import layers as layers_folder
from models.cudagraph_mode import CUDAGraphMode
from models.loading.loader import load_model
from models.ops import custom_op
from scripts.quantize_tiny import FORMATS, write_quantized
from services.engine.compilation import passes as passes_folder
from services.engine.compilation.graphs import fusion_check
from services.engine.config.compilation_level import CompilationLevel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.quantized_checkpoints import WIDE
from tests.support.random_checkpoints import write_checkpoint

ATTENTION = "unified_attention_with_output"
LATENT_ATTENTION = "latent_attention_with_output"
OUTPUT = {ATTENTION: 3, LATENT_ATTENTION: 5}
"""The argument that attention writes to."""
FUSED = {
    "qwen3": {"norm_linear", "linear_residual_norm", "linear_residual_norm_linear", ATTENTION},
    "gpt_oss": {"norm_linear", "linear_residual_norm", "add_rms_norm", ATTENTION},
    "glm4_moe_groups": {"fused_moe_with_shared", "linear_residual_norm", ATTENTION},
    "qwen2_moe": {"fused_moe_with_shared", "linear_residual_norm", ATTENTION},
    "deepseek_v3": {"fused_moe_with_shared", "linear_residual_norm", LATENT_ATTENTION},
}


@pytest.fixture(scope="module", params=FUSED)
def family(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, request.param)
    return request.param, folder


def engine(folder, level=CompilationLevel.PIECEWISE):
    config = compilation_config(
        level=level,
        use_inductor=False,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=(1, 3, 16),
    )
    return GraphEngine(folder, config)


def test_every_fused_operator_of_a_captured_graph_is_compared(family, monkeypatch):
    name, folder = family
    compared = set()

    def compare(expected, actual, *, of):
        compared.add(of.removeprefix("octavo::"))
        return original(expected, actual, of=of)

    original = fusion_check.compare
    monkeypatch.setattr(fusion_check, "compare", compare)
    captured = engine(folder).capture()
    assert captured
    assert not any(each.fault for each in captured)
    assert compared >= FUSED[name]


def test_a_fused_operator_that_computes_something_else_is_a_fault_with_its_name(
    family, monkeypatch
):
    name, folder = family
    running = engine(folder)
    for fused in sorted(FUSED[name]):
        with monkeypatch.context() as patch:
            patch.setitem(fusion_check._UNFUSED, f"octavo::{fused}", doubled(fused))
            (captured,) = running.capture(num_graphs=1)
        assert f"octavo::{fused} is off by" in captured.fault


def doubled(fused):
    """Returns a reference that computes twice what it should."""
    original = fusion_check._UNFUSED[f"octavo::{fused}"]

    def reference(*args):
        result = original(*args)
        if result is None:
            args[OUTPUT[fused]].mul_(2)
            return None
        return result * 2

    return reference


@pytest.mark.parametrize(
    ("form", "name", "head_dim"),
    # With heads of 128 attention rounds what the first product takes.
    [("awq", "packed_linear", 64), ("awq", "packed_linear_residual_norm", 64),
     ("fp8-block", "feed_forward", 64), ("fp8-block", "feed_forward", 128)],
)  # fmt: skip
def test_products_of_quantised_weights_are_compared(form, name, head_dim, tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "plain", "llama", **WIDE | {"head_dim": head_dim})
    write_quantized(tmp_path / "plain", tmp_path / "stored", FORMATS[form])
    config = compilation_config(
        level=CompilationLevel.PIECEWISE,
        use_inductor=False,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=(3,),
    )

    def faults():
        model = load_model(
            tmp_path / "stored",
            device=torch.device("cpu"),
            dtype=torch.float32,
            keep_quantized=True,
        )
        return {each.fault for each in GraphEngine(tmp_path, config, model=model).capture()}

    assert faults() == {""}
    operator = f"octavo::{name}"
    original = fusion_check._UNFUSED[operator]

    def broken(*args):
        return original(*args) * 2

    monkeypatch.setitem(fusion_check._UNFUSED, operator, broken)
    assert any(f"{operator} is off by" in each for each in faults())


def test_every_operator_that_passes_insert_is_compared():
    passes = "".join(path.read_text() for path in Path(passes_folder.__file__).parent.rglob("*.py"))
    layers = "".join(path.read_text() for path in Path(layers_folder.__file__).parent.glob("*.py"))
    known = {operator._schema.name.removeprefix("octavo::") for operator in custom_op._CALLS}
    named = {name for name in known if re.search(rf"\"{name}\"|octavo\.{name}\b", passes)}
    inserted = {name for name in named if not re.search(rf"\b{name}\(", layers)}
    assert {"norm_linear", "all_reduce_norm"} <= inserted
    assert {f"octavo::{name}" for name in inserted} <= fusion_check._UNFUSED.keys()


def test_a_model_without_passes_has_nothing_to_compare(family, monkeypatch):
    _, folder = family
    monkeypatch.setattr(fusion_check, "compare", pytest.fail)
    captured = engine(folder, CompilationLevel.NO_COMPILATION).capture()
    assert not any(each.fault for each in captured)
