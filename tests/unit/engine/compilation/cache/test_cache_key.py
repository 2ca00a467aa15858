from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from services.engine.compilation.cache import key_fields
from services.engine.compilation.cache.cache_key import Factors, compute_factors
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.config.engine_config import EngineConfig
from tests.support.eagle3_checkpoints import write_eagle3_head
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
ENGINE = EngineConfig.from_flags(compilation_level=3)

COMPILATION_CHANGES = {
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


def other_value(flag, value):
    """Returns a value for a flag that is not the present one."""
    if flag in COMPILATION_CHANGES:
        return COMPILATION_CHANGES[flag]
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, Path):
        return value / "elsewhere"
    return 7 if value is None else f"{value}_changed"


def with_other(flag):
    """Returns the configuration with another value of a flag, which need not be valid."""
    for name, section in ENGINE.sections().items():
        if flag in section.model_fields:
            own = getattr(ENGINE, name)
            change = {flag: other_value(flag, getattr(own, flag))}
            return ENGINE.model_copy(update={name: own.model_copy(update=change)})
    raise AssertionError(flag)


def factors_of(config: EngineConfig) -> Factors:
    return compute_factors(config, ModelConfig.from_folder(config.checkpoint.model), CPU)


@pytest.fixture(scope="module")
def factors():
    return factors_of(ENGINE)


FOLDERS = ("model", "draft_model")


@pytest.mark.parametrize("flag", [flag for flag in ENGINE.flags() if flag not in FOLDERS])
def test_each_flag_of_the_engine_changes_the_key_unless_listed(flag, factors):
    is_same = factors_of(with_other(flag)).key == factors.key
    is_listed = flag in key_fields.IRRELEVANT_FLAGS
    # Eager engines are of level 0.
    assert is_same == (is_listed and flag != "enforce_eager")


def test_the_layers_that_a_head_reads_change_the_key(tmp_path):
    def key(folder):
        config = EngineConfig.from_flags(
            compilation_level=3, num_speculative_tokens=2, draft_model=folder
        )
        return factors_of(config).key

    def head(name, *layers):
        write_eagle3_head(tmp_path / name, TINY_CHECKPOINT, eagle_aux_hidden_state_layer_ids=layers)
        return tmp_path / name

    first, moved, other = head("first", 0, 1, 2), head("moved", 0, 1, 2), head("other", 0, 0, 2)
    assert key(first) == key(moved)
    assert len({key(first), key(other), key(TINY_CHECKPOINT)}) == 3
    assert "draft_model" in key_fields.IRRELEVANT_FLAGS


@pytest.mark.parametrize("variant", ["mimo_v2", "deepseek_v4", "qwen3_next"])
def test_drafts_change_the_key_where_they_read_the_last_layer(tmp_path, variant):
    write_checkpoint(tmp_path, variant)

    def factors(**flags):
        config = EngineConfig.from_flags(compilation_level=3, model=tmp_path, **flags)
        return factors_of(config)

    reads = variant != "qwen3_next"
    plain, drafting = factors(), factors(num_speculative_tokens=2)
    assert (plain.key != drafting.key) == reads
    assert factors(num_speculative_tokens=2, speculative_method="ngram") == plain


def test_sizes_that_are_still_to_be_planned_are_as_good_as_none(factors):
    auto = EngineConfig.from_flags(compilation_level=3, cudagraph_capture_sizes="auto")
    assert factors_of(auto) == factors


def test_each_flag_is_in_exactly_one_table():
    relevant, irrelevant = key_fields.RELEVANT_FLAGS, key_fields.IRRELEVANT_FLAGS
    assert not relevant.keys() & irrelevant.keys()
    assert relevant.keys() | irrelevant.keys() == ENGINE.flags().keys()


def test_fields_of_the_model_that_are_left_out_exist():
    assert key_fields.IRRELEVANT_MODEL_FIELDS.keys() <= ModelConfig.__dataclass_fields__.keys()


def test_metrics_tls_and_grammar_limits_leave_the_key_as_it_is(factors):
    serving = EngineConfig.from_flags(
        compilation_level=3,
        metrics_port=0,
        tls_cert=Path("cert.pem"),
        tls_key=Path("key.pem"),
        max_grammar_bytes=7,
        otlp_endpoint="http://127.0.0.1:4317",
    )
    assert factors_of(serving) == factors


def test_another_model_changes_the_key_and_another_folder_does_not(tmp_path, factors):
    write_checkpoint(tmp_path / "other", "qwen3")
    other = ENGINE.with_flags(model=tmp_path / "other")
    assert "model.hidden_size" in factors_of(other).differences(factors)
    (tmp_path / "copy").mkdir()
    text = (TINY_CHECKPOINT / "config.json").read_text()
    (tmp_path / "copy" / "config.json").write_text(text)
    copy = ENGINE.with_flags(model=tmp_path / "copy")
    assert factors_of(copy).key == factors.key


def test_source_files_versions_device_and_compiler_settings_take_part(factors):
    names = set(factors.values)
    assert "source.models/layers/decoder.py" in names
    assert "source.services/engine/compilation/trace/backend.py" in names
    assert not any(name.startswith("source.services/engine/compilation/graphs/") for name in names)
    assert {"torch.version", "torch.python", "torch.triton"} <= names
    assert {"device.type", "device.capability"} <= names
    with torch._inductor.config.patch(epilogue_fusion=False):
        changed = factors_of(ENGINE)
    assert changed.differences(factors) == ["inductor.epilogue_fusion"]


def test_a_variable_that_changes_generated_code_changes_the_key(factors, monkeypatch):
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    assert factors_of(ENGINE).differences(factors) == ["environment.TRITON_F32_DEFAULT"]


def test_sources_that_are_left_out_exist():
    root = Path(__file__).resolve().parents[5]
    assert all((root / name).exists() for name in key_fields.IRRELEVANT_SOURCES)


def test_factors_are_the_same_each_time(factors):
    assert factors_of(ENGINE) == factors


def test_differences_name_what_one_side_lacks_too():
    assert Factors({"a": "1", "b": "2"}).differences(Factors({"b": "3", "c": "4"})) == [
        "a",
        "b",
        "c",
    ]
