"""Ranks and stages of models with states, under the real scheduler: the tokens of one rank."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.mtp_checkpoints import write_mtp_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.state_variants import STATE_VARIANTS
from tests.support.step_driver import sampling as greedy_with

LONG = [(7 * i * i + 3 * i + 11) % 90 for i in range(200)]
PROMPTS = [LONG[:3], LONG[:100], LONG[50:115], LONG[:70] + LONG[120:150], LONG[5:6], LONG[:130]]
NUM_OUTPUT, LONG_OUTPUT = 12, 40
SIZES = {"max_model_len": 256, "block_size": 16, "max_num_batched_tokens": 64}
LAYOUTS = {
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "stages of two": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "whole experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "own requests": {"data_parallel_size": 2},
    "own requests of two": {"data_parallel_size": 2, "tensor_parallel_size": 2},
}
UNEVEN = {"nemotron_h_moe": {"pipeline_layers": [2, 3]}}
"""Stages of which each caches something."""
WITH_EXPERTS = ("whole experts", "own requests", "own requests of two")
"""Layouts that only models with experts can have."""
EXPERTS = {
    *("bailing_hybrid", "granite_hybrid", "kimi_linear", "lfm2_moe", "minimax", "nemotron_h_moe"),
    *("qwen3_5_moe", "qwen3_next"),
}
FAMILIES = [*sorted(EXPERTS), "falcon_h1", "lfm2", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5"]
ALWAYS = {
    ("qwen3_5", "two ranks"),
    ("falcon_h1", "stages of two"),
    ("nemotron_h_moe", "whole experts"),
    ("qwen3_next", "own requests"),
}
CASES = [
    (family, layout)
    if (family, layout) in ALWAYS
    else pytest.param(family, layout, marks=pytest.mark.families)
    for family in FAMILIES
    if family in STATE_VARIANTS
    for layout in LAYOUTS
    if family in EXPERTS or layout not in WITH_EXPERTS
]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def expected_tokens(folder, num_output):
    """Returns each prompt's output in an engine of one rank."""
    eager = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
    engine = GraphEngine(folder, eager, num_blocks=400, **SIZES)
    return engine.run(PROMPTS, num_output)


@pytest.mark.parametrize(("family", "layout"), CASES)
async def test_tokens_are_those_of_one_rank(tmp_path, family, layout):
    write_checkpoint(tmp_path, family, max_position_embeddings=256)
    expected = expected_tokens(tmp_path, NUM_OUTPUT)
    options = LAYOUTS[layout] | (UNEVEN.get(family, {}) if "stages" in layout else {})
    config = ranks_config(tmp_path, num_kv_blocks=400, **SIZES, **options)
    async with ranks_core(config) as ranks:
        for _ in range(2):
            assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_OUTPUT)) == expected
        counters = ranks.core.stats().counters
    # The second time, from snapshots of the first.
    assert counters.scheduler.cached_tokens >= 2 * 64


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_5", "two ranks"), ("falcon_h1", "two ranks"), ("falcon_h1", "two stages")],
)
async def test_few_blocks_cost_preemptions_and_no_token(tmp_path, family, layout):
    write_checkpoint(tmp_path, family, max_position_embeddings=256)
    expected = expected_tokens(tmp_path, LONG_OUTPUT)
    eager = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
    pages = GraphEngine(tmp_path, eager, num_blocks=400, **SIZES).limits.num_state_blocks
    scarce = {"num_kv_blocks": 1 + 10 + 3 * pages}
    config = ranks_config(tmp_path, **scarce, **SIZES, **LAYOUTS[layout])
    async with ranks_core(config) as ranks:
        for _ in range(2):
            assert await ranks.generate(PROMPTS, greedy_with(max_tokens=LONG_OUTPUT)) == expected
        stats = ranks.core.stats()
    assert stats.counters.scheduler.num_preemptions > 0
    assert stats.load.num_used_blocks == 0


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3_5", "two ranks"), ("qwen3_5_moe", "own requests")]
)
async def test_the_draft_layer_on_ranks_changes_no_token(tmp_path, family, layout):
    write_mtp_checkpoint(tmp_path, family, agreement=0.98, max_position_embeddings=256)
    expected = expected_tokens(tmp_path, 2 * NUM_OUTPUT)
    drafts = {"num_speculative_tokens": 2, "min_speculative_tokens": 2}
    config = ranks_config(tmp_path, num_kv_blocks=400, **SIZES, **drafts, **LAYOUTS[layout])
    async with ranks_core(config) as ranks:
        for _ in range(2):
            assert await ranks.generate(PROMPTS, greedy_with(max_tokens=2 * NUM_OUTPUT)) == expected
        counters = ranks.core.stats().counters
    assert counters.scheduler.cached_tokens >= 2 * 64
    assert 0 < counters.drafts.num_accepted < counters.drafts.num_verified
