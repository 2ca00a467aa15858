"""Whole prompts of models whose tokens see later ones, as EmbeddingGemma: transformers' vectors."""

import numpy as np
import pytest

from models.config import ModelConfig
from models.config_sections.pooling import read_pooling
from models.cudagraph_mode import CUDAGraphMode
from services.engine.config.compilation_level import CompilationLevel
from services.engine.config.engine_config import EngineConfig
from services.engine.model_fit import check_model_fit
from tests.support.bidirectional_checkpoint import WINDOW, expected_vector, write_bidirectional
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.pooled_engine import PooledEngine
from tests.support.random_checkpoints import write_checkpoint

PROMPTS = [[(7 * i + 13 * n + i * i) % 97 for i in range(n)] for n in (1, 7, 33, 2, 100, 5, 64)]
TOLERANCE = 1e-4
OF_GRAPHS = {"cudagraph_capture_sizes": (2, 4, 8, 64, 128)}
LEVELS = {
    "graphs": compilation_config(cudagraph_mode=CUDAGraphMode.FULL, **OF_GRAPHS),
    "compiled": compilation_config(
        level=CompilationLevel.PIECEWISE,
        use_inductor=False,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        **OF_GRAPHS,
    ),
}


@pytest.fixture
def checkpoint(tmp_path):
    """A folder, and the vectors of PROMPTS by transformers."""
    model = write_bidirectional(tmp_path)
    return tmp_path, np.stack([expected_vector(model, tmp_path, each) for each in PROMPTS])


@pytest.mark.parametrize("num_tokens", [128, 256])
def test_vectors_are_those_of_transformers(checkpoint, num_tokens):
    folder, expected = checkpoint
    engine = PooledEngine(folder, max_num_batched_tokens=num_tokens, num_blocks=129)
    for _ in range(2):
        found = engine.embed(PROMPTS)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert engine.scheduler.counts.cached_tokens == 0


def test_few_blocks_and_rows_change_no_vector(checkpoint):
    folder, expected = checkpoint
    engine = PooledEngine(folder, max_num_batched_tokens=128, num_blocks=90, max_num_seqs=2)
    np.testing.assert_allclose(engine.embed(PROMPTS), expected, atol=TOLERANCE)
    assert engine.scheduler.num_free_blocks == 89


@pytest.mark.parametrize("level", LEVELS)
def test_graphs_change_no_vector(checkpoint, level, tmp_path):
    folder, expected = checkpoint
    config = LEVELS[level].model_copy(update={"compile_cache_dir": tmp_path / "compiled"})
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 128, "num_blocks": 200}
    engine = GraphEngine(folder, config, pooling=read_pooling(folder, "embed"), **sizes)
    engine.capture()
    np.testing.assert_allclose(engine.embed(PROMPTS), expected, atol=TOLERANCE)
    np.testing.assert_allclose(engine.embed(PROMPTS[:1]), expected[:1], atol=TOLERANCE)
    assert engine.faults == []


def test_a_window_counts_both_sides(checkpoint):
    config = ModelConfig.from_folder(checkpoint[0])
    assert config.sees_later
    assert set(config.sliding_windows) == {WINDOW // 2 + 1, None}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--task embed serves it"),
        ({"task": "score"}, "--task embed serves it"),
        ({"task": "embed", "max_num_batched_tokens": 64}, "it must be 128 or more"),
        ({"task": "embed", "batch_invariant": True}, "--batch-invariant does not cover"),
    ],
)
def test_flags_that_do_not_fit_are_refused(checkpoint, flags, message):
    folder, _ = checkpoint
    config = EngineConfig.from_flags(model=folder, device="cpu", **flags)
    with pytest.raises(ValueError, match=message):
        check_model_fit(config, ModelConfig.from_folder(folder))


def test_shorter_prompts_need_shorter_steps(checkpoint):
    folder, _ = checkpoint
    flags = {"task": "embed", "max_num_batched_tokens": 64, "max_model_len": 64}
    config = EngineConfig.from_flags(model=folder, device="cpu", **flags)
    check_model_fit(config, ModelConfig.from_folder(folder))


def test_causal_models_see_no_later_tokens(tmp_path):
    write_checkpoint(tmp_path, "gemma3")
    assert not ModelConfig.from_folder(tmp_path).sees_later
