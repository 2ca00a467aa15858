"""Selection, digests, promises and dumps of passes."""

import importlib.util
import inspect
import shutil
from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from services.engine.compilation.cache import cache_key
from services.engine.compilation.passes import linear_gate, selection
from services.engine.compilation.passes.canonical.canonical_pass import CanonicalPass
from services.engine.compilation.passes.manager import PostGradPassManager
from services.engine.compilation.passes.multi_stream import MultiStreamPass
from services.engine.compilation.passes.selection import selected_passes
from services.engine.compilation.passes.unmatched import UnmatchedPassError
from services.engine.compilation.program.compile_range import CompileRange
from services.engine.config.checkpoint import REPOSITORY
from services.engine.config.compilation import PASS_NAMES
from services.engine.config.engine_config import EngineConfig
from tests.support.compilation import compilation_config
from tests.support.compiled_models import Toy, compile_at, compile_toy
from tests.support.plain_model import PlainModel

CPU = torch.device("cpu")


def selected(**flags):
    return [each.name for each in selected_passes(compilation_config(**flags))]


def test_all_passes_run_by_default_in_the_order_of_their_names():
    assert selected() == list(PASS_NAMES)
    assert selected(passes=[*reversed(PASS_NAMES)]) == list(PASS_NAMES)


def test_passes_are_chosen_and_left_out_by_name():
    assert selected(passes=["clean_up", "canonical"]) == ["canonical", "clean_up"]
    assert "norm_linear" not in selected(disable_pass=["norm_linear"])


def test_one_stream_leaves_multi_stream_out():
    assert "multi_stream" not in selected(max_num_streams=1)


def test_an_unknown_pass_is_refused():
    with pytest.raises(ValueError, match="norm_linear"):
        EngineConfig.from_flags(disable_pass=["nothing"])


def changed_pass(original, folder):
    """Returns a pass with the source of another and one more comment."""
    source = Path(inspect.getfile(type(original)))
    path = Path(shutil.copy(source, folder))
    path.write_text(path.read_text() + "# changed\n")
    spec = importlib.util.spec_from_file_location(f"changed_{source.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        changed = getattr(module, type(original).__name__)(*original.settings.values())
        assert changed.uuid
    return changed


def every_pass():
    return selected_passes(compilation_config())


@pytest.mark.parametrize("original", every_pass(), ids=lambda each: each.name)
def test_a_changed_source_changes_the_digest_of_each_pass(original, tmp_path):
    (same,) = (each for each in every_pass() if each.name == original.name)
    assert same.uuid == original.uuid
    assert changed_pass(original, tmp_path).uuid != original.uuid


def test_a_changed_setting_changes_the_digest():
    assert MultiStreamPass(2).uuid != MultiStreamPass(3).uuid


def test_the_digest_of_canonical_covers_all_its_files():
    names = {path.name for path in CanonicalPass().sources}
    assert {"norm.py", "halves.py", "rotary.py", "canonical_pass.py"} <= names


@pytest.fixture(scope="module")
def configured():
    config = EngineConfig.from_flags(compilation_level=3)
    return config, ModelConfig.from_folder(config.checkpoint.model), CPU


def test_the_key_of_compiled_pieces_has_each_selected_pass(configured):
    _, model, device = configured
    factors = cache_key.compute_factors(EngineConfig.from_flags(compilation_level=3), model, device)
    assert {name for name in factors.values if name.startswith("pass.")} == {
        f"pass.{name}" for name in PASS_NAMES
    }


@pytest.mark.parametrize("original", every_pass(), ids=lambda each: each.name)
def test_a_changed_source_of_each_pass_changes_the_key(original, configured, tmp_path, monkeypatch):
    factors, changed = cache_key.compute_factors(*configured), changed_pass(original, tmp_path)
    monkeypatch.setattr(
        selection,
        "selected_passes",
        lambda config: [
            changed if each.name == changed.name else each for each in selected_passes(config)
        ],
    )
    other = cache_key.compute_factors(*configured)
    assert factors.differences(other) == [f"pass.{original.name}"]
    assert factors.key != other.key


def test_the_key_of_traces_has_the_source_files_of_all_passes(configured):
    names = cache_key.trace_factors(*configured).values.keys()
    for each in every_pass():
        for path in each.sources:
            assert f"source.{path.relative_to(REPOSITORY).as_posix()}" in names


class OnlyFewTokens(linear_gate.LinearGatePass):
    def is_applicable_for_range(self, compile_range):
        return compile_range.end <= 64


@pytest.mark.parametrize(("end", "names"), [(64, ["linear_gate"]), (65, [])])
def test_a_pass_runs_only_in_its_range(end, names):
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    manager = PostGradPassManager([OnlyFewTokens()], compile_range=CompileRange(end=end))
    assert list(manager.run(graph)) == names


class PromisingToy(Toy):
    def expected_passes(self):
        return {"norm_linear"}


def test_a_promise_without_match_is_an_error():
    with pytest.raises(UnmatchedPassError, match=r"norm_linear match nothing.*--allow-unmatched"):
        compile_toy(PromisingToy(), 2)


@pytest.mark.parametrize(
    "flags", [{"allow_unmatched_passes": True}, {"disable_pass": ["norm_linear"]}]
)
def test_a_promise_without_match_is_allowed_by_flag_and_void_without_the_pass(flags):
    compile_toy(PromisingToy(), 2, **flags)


def test_a_dump_holds_the_graph_before_and_after_each_pass(tmp_path):
    compile_at(3, debug_dump_path=tmp_path)(PlainModel())
    folder = tmp_path / "rank_0"
    texts = [(folder / "traced_graph.py").read_text()]
    texts += [
        (folder / f"pass_{number}_{name}.py").read_text()
        for number, name in enumerate(PASS_NAMES, start=1)
    ]
    found = ["norm_linear.default" in text for text in texts]
    after = 1 + PASS_NAMES.index("norm_linear")
    assert found == [False] * after + [True] * (len(texts) - after)
