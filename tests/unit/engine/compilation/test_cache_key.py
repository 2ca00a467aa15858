from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from models.cudagraph_mode import CUDAGraphMode
from services.engine.compilation import key_fields
from services.engine.compilation.cache_key import Factors, compute_factors
from services.engine.compilation_config import CompilationConfig
from services.engine.config import TINY_CHECKPOINT, EngineConfig
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
ENGINE = EngineConfig(compilation_level=3)
CONFIG = ENGINE.compilation_config("cpu")

COMPILATION_CHANGES = {
    "level": 2,
    "cudagraph_mode": CUDAGraphMode.FULL,
    "cudagraph_capture_sizes": (1, 2),
    "cudagraph_piece_sizes": (1, 2),
    "cuda_graph_sizes": (64,),
    "cudagraph_copy_inputs": True,
    "splitting_ops": ("octavo::other",),
    "use_inductor": False,
    "compile_sizes": (1,),
    "inductor_compile_config": {"max_autotune": True},
    "debug_dump_path": Path("elsewhere"),
    "cache_dir": Path("elsewhere"),
}
COMPILATION_FLAGS = {
    "enforce_eager": True,
    "compilation_level": 2,
    "cudagraph_mode": "full",
    "cudagraph_capture_sizes": [1, 2],
    "cudagraph_piece_sizes": [1, 2],
    "cuda_graph_sizes": [64],
    "cudagraph_copy_inputs": True,
    "splitting_ops": ["octavo::other"],
    "use_inductor": False,
    "compile_sizes": [1],
    "inductor_compile_config": {"max_autotune": True},
    "debug_dump_path": Path("elsewhere"),
    "compile_cache_dir": Path("elsewhere"),
}
CHANGE_THE_KEY = {
    "enforce_eager", "compilation_level", "splitting_ops", "use_inductor",
    "inductor_compile_config",
}  # fmt: skip


def other_value(config, name):
    """Returns a value for a field that is not the present one."""
    if name in COMPILATION_FLAGS:
        return COMPILATION_FLAGS[name]
    value = getattr(config, name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, Path):
        return value / "elsewhere"
    return 7 if value is None else f"{value}_changed"


@pytest.fixture(scope="module")
def factors():
    return compute_factors(CONFIG, ENGINE, CPU)


@pytest.mark.parametrize("name", list(CompilationConfig.model_fields))
def test_each_compilation_field_changes_the_key_unless_listed(name, factors):
    changed = CONFIG.model_copy(update={name: COMPILATION_CHANGES[name]})
    is_same = compute_factors(changed, ENGINE, CPU).key == factors.key
    assert is_same == (name in key_fields.IRRELEVANT_COMPILATION_FIELDS)


@pytest.mark.parametrize("name", [name for name in EngineConfig.model_fields if name != "model"])
def test_each_flag_of_the_engine_changes_the_key_unless_listed(name, factors):
    # Copied without validation: values need only differ.
    changed = ENGINE.model_copy(update={name: other_value(ENGINE, name)})
    is_same = compute_factors(changed.compilation_config("cpu"), changed, CPU).key == factors.key
    is_listed = name in key_fields.IRRELEVANT_ENGINE_FIELDS
    assert is_same == (is_listed and name not in CHANGE_THE_KEY)


def test_sizes_that_are_still_to_be_planned_are_as_good_as_none(factors):
    auto = EngineConfig(compilation_level=3, cudagraph_capture_sizes="auto")
    config = auto.compilation_config("cpu")
    assert compute_factors(config, auto, CPU) == factors


@pytest.mark.parametrize(
    ("config", "relevant", "irrelevant"),
    [
        (
            EngineConfig,
            key_fields.RELEVANT_ENGINE_FIELDS,
            key_fields.IRRELEVANT_ENGINE_FIELDS,
        ),
        (
            CompilationConfig,
            key_fields.RELEVANT_COMPILATION_FIELDS,
            key_fields.IRRELEVANT_COMPILATION_FIELDS,
        ),
    ],
    ids=["engine", "compilation"],
)
def test_each_field_is_in_exactly_one_table(config, relevant, irrelevant):
    assert not relevant.keys() & irrelevant.keys()
    assert relevant.keys() | irrelevant.keys() == config.model_fields.keys()


def test_fields_of_the_model_that_are_left_out_exist():
    assert key_fields.IRRELEVANT_MODEL_FIELDS.keys() <= ModelConfig.__dataclass_fields__.keys()


def test_metrics_tls_and_grammar_limits_leave_the_key_as_it_is(factors):
    serving = EngineConfig(
        compilation_level=3,
        metrics_port=0,
        tls_cert=Path("cert.pem"),
        tls_key=Path("key.pem"),
        max_grammar_bytes=7,
        otlp_endpoint="http://127.0.0.1:4317",
    )
    assert compute_factors(serving.compilation_config("cpu"), serving, CPU) == factors


def test_another_model_changes_the_key_and_another_folder_does_not(tmp_path, factors):
    write_checkpoint(tmp_path / "other", "qwen3")
    other = ENGINE.model_copy(update={"model": tmp_path / "other"})
    assert "model.hidden_size" in compute_factors(CONFIG, other, CPU).differences(factors)
    (tmp_path / "copy").mkdir()
    text = (TINY_CHECKPOINT / "config.json").read_text()
    (tmp_path / "copy" / "config.json").write_text(text)
    copy = ENGINE.model_copy(update={"model": tmp_path / "copy"})
    assert compute_factors(CONFIG, copy, CPU).key == factors.key


def test_source_files_versions_device_and_compiler_settings_take_part(factors):
    names = set(factors.values)
    assert "source.models/layers/decoder.py" in names
    assert "source.services/engine/compilation/backend.py" in names
    assert not any(name.startswith("source.services/engine/compilation/graphs/") for name in names)
    assert {"torch.version", "torch.python", "torch.triton"} <= names
    assert {"device.type", "device.capability"} <= names
    with torch._inductor.config.patch(epilogue_fusion=False):
        changed = compute_factors(CONFIG, ENGINE, CPU)
    assert changed.differences(factors) == ["inductor.epilogue_fusion"]


def test_a_variable_that_changes_generated_code_changes_the_key(factors, monkeypatch):
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    assert compute_factors(CONFIG, ENGINE, CPU).differences(factors) == [
        "environment.TRITON_F32_DEFAULT"
    ]


def test_sources_that_are_left_out_exist():
    root = Path(__file__).resolve().parents[4]
    assert all((root / name).exists() for name in key_fields.IRRELEVANT_SOURCES)


def test_factors_are_the_same_each_time(factors):
    assert compute_factors(CONFIG, ENGINE, CPU) == factors


def test_differences_name_what_one_side_lacks_too():
    assert Factors({"a": "1", "b": "2"}).differences(Factors({"b": "3", "c": "4"})) == [
        "a",
        "b",
        "c",
    ]
