"""Engines whose layers choose keys give transformers' tokens, however steps cut them."""

import random

import pytest
import torch

from models.config import ModelConfig
from models.cudagraph_mode import CUDAGraphMode
from services.engine.config.compilation_level import CompilationLevel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import greedy_continuations
from tests.support.step_driver import sampling as greedy_with

NUM_TOKENS = 16
BLOCK_SIZE = 4
draws = random.Random(7)
SHARED = draws.choices(range(97), k=70)
PROMPTS = [
    *(draws.choices(range(97), k=length) for length in (61, 57, 50)),
    *(SHARED, [5, 17, 3], [*SHARED[:66], 4, 9], [12]),
]
SIZES = {"max_model_len": 128, "num_blocks": 400, "block_size": BLOCK_SIZE}
EAGER = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
GRAPHS = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(2, 4, 8)
)
PIECES = compilation_config(
    level=CompilationLevel.PIECEWISE,
    use_inductor=False,
    cudagraph_mode=CUDAGraphMode.PIECEWISE,
    cudagraph_capture_sizes=(8, 16, 64),
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


VARIANTS = ["deepseek_v4", "deepseek_v4_odd", "hy_v4", "hy_v4_odd", "minimax_m3"]


@pytest.fixture(scope="module", params=VARIANTS)
def served(request, tmp_path_factory):
    """Returns the folder, and transformers' tokens."""
    folder = tmp_path_factory.mktemp("checkpoint")
    reference = write_checkpoint(folder, request.param)
    return folder, greedy_continuations(reference, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("config", [EAGER, GRAPHS, PIECES], ids=["eager", "graphs", "pieces"])
@pytest.mark.parametrize("chunk", [5, 37, 128])
def test_tokens_are_those_of_transformers(served, config, chunk, tmp_path):
    folder, expected = served
    config = config.model_copy(update={"compile_cache_dir": tmp_path})
    engine = GraphEngine(folder, config, max_num_batched_tokens=chunk, **SIZES)
    engine.capture()
    assert engine.run(PROMPTS, NUM_TOKENS) == expected
    # Once more, with prefixes that were computed before.
    assert engine.run(PROMPTS, NUM_TOKENS) == expected
    assert engine.faults == []
    assert engine.scheduler.num_free_blocks == SIZES["num_blocks"] - 1
    assert engine.scheduler.counts.cached_tokens >= 64


def test_few_blocks_cost_preemptions_and_no_token(served):
    folder, expected = served
    # Blocks of compressed keys have the entries of many tokens.
    has_compressed_keys = ModelConfig.from_folder(folder).compression is not None
    sizes = SIZES | {"num_blocks": 16 if has_compressed_keys else 40}
    engine = GraphEngine(folder, EAGER, max_num_batched_tokens=16, **sizes)
    assert engine.run(PROMPTS, NUM_TOKENS) == expected
    assert engine.scheduler.counts.num_preemptions
    assert engine.scheduler.num_free_blocks == sizes["num_blocks"] - 1


@pytest.mark.parametrize("level", [0, 3])
def test_rejected_drafts_cost_no_token(served, level, tmp_path):
    folder, expected = served
    config = compilation_config(
        level=level, use_inductor=False, cudagraph_mode=CUDAGraphMode.NONE,
        compile_cache_dir=tmp_path,
    )  # fmt: skip
    drafts = {"num_speculative_tokens": 3, "lookup_sizes": (1, 2)}
    engine = GraphEngine(folder, config, max_num_batched_tokens=37, **SIZES, **drafts)
    assert engine.run(PROMPTS, NUM_TOKENS) == expected
    assert engine.run(PROMPTS, NUM_TOKENS) == expected
    assert engine.scheduler.num_free_blocks == SIZES["num_blocks"] - 1


@pytest.mark.parametrize(
    ("variant", "num_ranks"),
    [("deepseek_v4", 1), ("deepseek_v4", 2), ("hy_v4", 2), ("minimax_m3", 2)],
)
async def test_stages_give_the_tokens_of_transformers(tmp_path, variant, num_ranks):
    reference = write_checkpoint(tmp_path, variant)
    expected = greedy_continuations(reference, PROMPTS, 12)
    sizes = {"max_model_len": 128, "num_kv_blocks": 200, "max_num_batched_tokens": 16}
    sizes["tensor_parallel_size"] = num_ranks
    config = ranks_config(tmp_path, pipeline_parallel_size=2, **sizes)
    async with ranks_core(config) as ranks:
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=12)) == expected
