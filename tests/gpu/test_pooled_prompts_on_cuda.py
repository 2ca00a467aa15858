"""Vectors and scores on a GPU: graphs and compiled pieces give those of a CPU in float32."""

import json

import numpy as np
import pytest
import torch

from models.config_sections.pooling import read_pooling
from models.cudagraph_mode import CUDAGraphMode
from services.engine.batch import CUDAGraphMode as CUDAGraphModeOnWire
from services.engine.config.compilation_level import CompilationLevel
from tests.support.bidirectional_checkpoint import expected_vector, write_bidirectional
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.invariance import batch_invariance
from tests.support.pooled_engine import PooledEngine, write_pooling
from tests.support.random_checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + 13 * n + i * i) % 97 for i in range(n)] for n in (1, 7, 33, 2, 100, 5, 64)]
VARIANTS = {
    "last token": ("qwen3", "lasttoken"),
    "mean": ("llama_bias", "mean_tokens"),
    "first token": ("gemma2", "cls_token"),
    "experts": ("qwen3_moe", "mean_tokens"),
    "states": ("falcon_h1", "lasttoken"),
    "answers": ("qwen3", None),
}
"""Variant -> family, and the mode of pooling; None for scores."""
SIZES = {
    "max_model_len": 128, "block_size": 16, "num_blocks": 200, "max_num_batched_tokens": 64,
    "device": "cuda",
}  # fmt: skip
OF_GRAPHS = {"cudagraph_capture_sizes": (2, 4, 8, 64)}
LEVELS = {
    "eager": compilation_config(cudagraph_mode=CUDAGraphMode.NONE),
    "graphs": compilation_config(cudagraph_mode=CUDAGraphMode.FULL, **OF_GRAPHS),
    "pieces": compilation_config(
        level=CompilationLevel.PIECEWISE,
        use_inductor=False,
        cudagraph_mode=CUDAGraphMode.PIECEWISE,
        **OF_GRAPHS,
    ),
    "compiled": compilation_config(
        level=CompilationLevel.PIECEWISE,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        **OF_GRAPHS,
    ),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest distance of a vector of length 1, or of a score, from float32 on a CPU. In bfloat16 a
token may choose other experts, which was off by 0.051 on an H200."""


@pytest.fixture(scope="module", params=VARIANTS)
def pooled(request, tmp_path_factory):
    """A checkpoint, how it pools, and the vectors of PROMPTS by a CPU in float32."""
    family, mode = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, family)
    task = "score" if mode is None else "embed"
    if mode is None:
        vocabulary = {"yes": 91, "no": 17}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    else:
        dense = [(torch.randn(24, 32), None, "activation.Tanh")] if mode == "mean_tokens" else []
        write_pooling(folder, mode, is_normalized=True, dense=dense)
    return folder, read_pooling(folder, task), PooledEngine(folder, task).embed(PROMPTS)


def check(found, expected, dtype):
    distances = np.linalg.norm(found - expected, axis=1)
    assert distances.max() <= TOLERANCE[dtype], distances


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_vectors_are_those_of_a_cpu(pooled, level, dtype, tmp_path):
    folder, pooling, expected = pooled
    config = LEVELS[level].model_copy(update={"compile_cache_dir": tmp_path})
    engine = GraphEngine(folder, config, pooling=pooling, dtype=dtype, **SIZES)
    engine.capture()
    for _ in range(2):
        check(engine.embed(PROMPTS), expected, dtype)
    for prompt, vector in zip(PROMPTS, expected, strict=True):
        check(engine.embed([prompt]), vector[None], dtype)
    assert engine.faults == []
    modes = {step.cudagraph_runtime_mode for step, _ in engine.steps}
    assert bool(modes - {CUDAGraphModeOnWire.CUDA_GRAPH_MODE_NONE}) == (level != "eager")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_whole_prompts_of_a_model_that_sees_later_tokens(level, dtype, tmp_path):
    model = write_bidirectional(tmp_path)
    expected = np.stack([expected_vector(model, tmp_path, each) for each in PROMPTS])
    config = LEVELS[level].model_copy(update={"compile_cache_dir": tmp_path / "compiled"})
    sizes = SIZES | {"max_num_batched_tokens": 128}
    pooling = read_pooling(tmp_path, "embed")
    engine = GraphEngine(tmp_path, config, pooling=pooling, dtype=dtype, **sizes)
    engine.capture()
    check(engine.embed(PROMPTS), expected, dtype)
    check(engine.embed(PROMPTS[:1]), expected[:1], dtype)
    assert engine.faults == []


@pytest.mark.parametrize("max_num_batched_tokens", [7, 23])
def test_short_chunks_and_few_blocks_change_no_vector(pooled, max_num_batched_tokens):
    folder, pooling, expected = pooled
    config = LEVELS["eager"]
    limits = GraphEngine(folder, config, pooling=pooling, **SIZES).limits
    num_blocks = 1 + 9 * max(1, len(limits.layer_groups)) + 3 * limits.num_state_blocks
    sizes = SIZES | {"num_blocks": num_blocks}
    sizes["max_num_batched_tokens"] = max_num_batched_tokens
    engine = GraphEngine(folder, config, pooling=pooling, **sizes)
    check(engine.embed(PROMPTS), expected, torch.float32)


def test_in_batch_invariant_mode_a_vector_has_the_same_bits_in_any_company(pooled):
    folder, pooling, _ = pooled
    sizes = SIZES | {"dtype": torch.bfloat16}
    with batch_invariance():
        engine = GraphEngine(folder, LEVELS["eager"], pooling=pooling, **sizes)
        alone = np.concatenate([engine.embed([each]) for each in PROMPTS])
        sizes["max_num_batched_tokens"] = 23
        together = GraphEngine(folder, LEVELS["eager"], pooling=pooling, **sizes)
        np.testing.assert_array_equal(together.embed(PROMPTS), alone)
