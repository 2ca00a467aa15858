"""Real compiled pieces; minutes on a cold machine without the shared folder of kernels."""

from pathlib import Path

import pytest
import torch
from torch.fx import symbolic_trace

from models.config import ModelConfig
from services.engine.compilation.cache.cache_key import compute_factors
from services.engine.compilation.pieces.compiler_interface import LoadError
from services.engine.compilation.pieces.inductor_adaptor import InductorStandaloneAdaptor
from services.engine.config.engine_config import EngineConfig
from services.processes.private_folder import ExposedFolderError
from tests.support.compiled_models import compile_at
from tests.support.inductor_engine import NUM_OUTPUT, serve_compiled, write_served_checkpoint
from tests.support.inductor_engine import PROMPTS as LONGER_PROMPTS
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver, greedy_continuations

SHARED_KERNELS = Path(__file__).resolve().parents[5] / ".cache" / "inductor"
PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12]]


@pytest.fixture
def inductor(monkeypatch):
    """Inductor with one thread and one folder of kernels for all runs on this machine."""
    torch.set_num_threads(1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(SHARED_KERNELS))
    with torch._inductor.config.patch(compile_threads=1):
        yield


def outputs(folder, **options):
    driver = StepDriver(folder, **options)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    driver.decode(sequences, 9)
    return [each.output for each in sequences], driver.kv_cache_data


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_compiled_pieces_give_the_same_tokens_cold_and_from_disk(inductor, tmp_path):
    # An indexer leaves a compiler something to do between our operators.
    write_checkpoint(tmp_path / "model", "deepseek_v32", num_hidden_layers=1)
    engine = EngineConfig.from_flags(model=tmp_path / "model", compilation_level=3)
    factors = compute_factors(
        engine, ModelConfig.from_folder(tmp_path / "model"), torch.device("cpu")
    )
    tokens, cache = outputs(tmp_path / "model")
    for is_warm in (False, True):
        stats = []
        prepare = compile_at(
            3,
            use_inductor=True,
            factors=factors,
            compile_cache_dir=tmp_path / "pieces",
            debug_dump_path=tmp_path / f"dump_{int(is_warm)}",
        )
        compiled, compiled_cache = outputs(
            tmp_path / "model",
            prepare=lambda model: stats.append(prepare(model)),  # noqa: B023
        )
        num_compiled = stats[0].num_pieces - stats[0].num_without_code
        assert num_compiled >= 1
        assert stats[0].num_loaded == (num_compiled if is_warm else 0)
        assert compiled == tokens
        for ours, theirs in zip(compiled_cache, cache, strict=True):
            torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-4, atol=1e-5)
    assert list((tmp_path / "dump_0" / "rank_0").glob("submod_0_generated_*.py"))


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_an_engine_serves_tuned_sizes_cold_and_from_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(SHARED_KERNELS))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    reference = write_served_checkpoint(tmp_path / "model")
    expected = greedy_continuations(reference, LONGER_PROMPTS, NUM_OUTPUT)
    for is_warm in (False, True):
        served = serve_compiled(
            tmp_path / "model",
            device="cpu",
            compile_cache_dir=tmp_path / "pieces",
            compile_sizes=[1],
        )
        assert served.alone == expected[0]
        assert served.together == expected
        # Each kind of piece for any number of tokens, and for 1.
        num_distinct = served.compiled["num_distinct"]
        assert num_distinct >= 6
        assert num_distinct % 2 == 0
        # Some pieces may consist of our operators alone.
        num_compiled = num_distinct - served.compiled["num_without_code"]
        assert num_compiled >= 4
        assert served.compiled["num_loaded"] == (num_compiled if is_warm else 0)
        assert served.stats.num_late_builds == 0


def test_no_code_is_compiled_or_loaded_where_others_can_change_it(tmp_path, monkeypatch):
    exposed = tmp_path / "torchinductor_me"
    exposed.mkdir()
    exposed.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(exposed))
    with pytest.raises(ExposedFolderError, match=str(exposed)):
        InductorStandaloneAdaptor().load(b"of this torch")
    with pytest.raises(ExposedFolderError, match=str(exposed)):
        InductorStandaloneAdaptor().compile(symbolic_trace(torch.nn.ReLU()), [torch.ones(1)], {})


def test_bytes_that_are_no_artifact_do_not_load():
    with pytest.raises(LoadError):
        InductorStandaloneAdaptor().load(b"of another torch")
