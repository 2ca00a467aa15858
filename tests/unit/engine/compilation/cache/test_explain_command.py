import pytest

from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.cache.cache_key import Factors
from services.engine.compilation.cache.explain import explain as explained
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.start.loaded_model import LoadedModel
from services.processes.private_folder import private_path
from tests.support.forked_program import run_forked


def explain(*flags):
    return run_forked("services.engine", "cache", "explain", *flags)


def test_the_engine_explains_its_cache_and_does_not_serve(tmp_path):
    flags = ["--device", "cpu", "--compilation-level", "3", "--compile-cache-dir", str(tmp_path)]
    answer = explain(*flags)
    lines = answer.stdout.splitlines()
    assert lines[0] == f"nothing compiled for this configuration in {private_path(tmp_path)}"
    assert answer.returncode == 0, answer.stderr


def test_the_explanation_says_which_settings_the_key_holds_and_which_it_leaves_out(tmp_path):
    answer = explain("--device", "cpu", "--compile-cache-dir", str(tmp_path))
    held, left_out = answer.stdout.split("settings left out:")
    assert "  inductor_compile_config: settings of the compiler\n" in held
    assert "metrics_port" not in held
    assert "metrics_port" in left_out
    assert "inductor_compile_config" not in left_out


def test_the_explanation_of_stored_pieces_has_the_matches_of_passes(tmp_path):
    factors = Factors({"torch.version": "1"})
    cache = ArtifactCache.open(tmp_path, factors)
    cache.describe(factors)
    cache.store("key", b"piece")
    cache.store_matches({"linear_gate": 2, "clean_up": 0})
    lines = explained(tmp_path, factors, factors).splitlines()
    assert lines[0].endswith("1 compiled piece for this configuration")
    assert lines[1] == "matches of compiler passes: linear_gate 2, clean_up 0"


def test_the_explanation_of_a_traced_model_has_the_matches_of_passes(tmp_path):
    flags = {"device": "cpu", "compilation_level": 3, "compile_cache_dir": tmp_path}
    # A model of our own operators leaves no compiled pieces.
    traced = LoadedModel.load(EngineConfig.from_flags(**flags)).traced
    arguments = ["--device", "cpu", "--compile-cache-dir", str(tmp_path), "--compilation-level=3"]
    answer = explain(*arguments).stdout
    assert f"nothing compiled for this configuration in {private_path(tmp_path)}\n" in answer
    assert ": 1 traced program for this configuration\n" in answer
    matches = ", ".join(f"{name} {count}" for name, count in traced.pass_matches.items())
    assert f"matches of compiler passes: {matches}\n" in answer
    other = explain(*arguments, "--disable-pass", "norm_linear").stdout
    assert (
        f"nothing traced for this configuration in {private_path(tmp_path) / 'traces'}\n" in other
    )
    assert "1 traced program; 1 factor differs\n  engine.disable_pass: here" in other


@pytest.mark.parametrize("flags", [["--compilation-level", "9"], ["--model", "/nowhere"]])
def test_wrong_flags_are_an_error(flags):
    answer = explain(*flags)
    assert answer.returncode == 2
    assert answer.stderr.startswith("octavo cache explain: ")
