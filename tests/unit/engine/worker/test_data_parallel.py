"""Ranks with requests of their own that share the experts: the tokens of one rank."""

import os
import re

import pytest
import torch

from models.config import ModelConfig
from services.engine.batch import GraphKind
from tests.support import odd_rank
from tests.support.odd_rank import use_odd_ranks
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core, start_error
from tests.support.step_driver import greedy_continuations
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9], [5, 17, 3, 8], [7] * 20]
NUM_TOKENS = 12
PRODUCT = bool(os.environ.get("OCTAVO_TEST_ALL_RANKS"))
"""Tries all families with all numbers of ranks on all levels."""
CASES = {
    ("deepseek_v3", 2, 1, 0),
    ("qwen3_moe", 3, 1, 3),
    ("gpt_oss", 2, 1, 2),
    ("deepseek_v3", 2, 2, 3),
    ("glm4_moe", 2, 2, 0),
    ("llama4", 2, 1, 3),
    ("mimo_v2", 2, 1, 0),
    ("minimax_m3", 2, 1, 0),
}
"""Family, data-parallel ranks, processes of each, compilation level."""
ALL_CASES = {
    (family, size, width, level)
    for family in ("deepseek_v3", "qwen3_moe", "gpt_oss", "mixtral", "glm4_moe", "deepseek_v2")
    for size, width in ((2, 1), (3, 1), (2, 2))
    for level in range(4)
}
GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "cudagraph_piece_sizes": [8, 32],
    "capture_while_serving": False,
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def data_parallel(folder, size=2, **changes):
    return ranks_config(folder, data_parallel_size=size, **{"use_inductor": False} | changes)


@pytest.mark.parametrize(
    ("family", "size", "width", "level"), sorted(ALL_CASES if PRODUCT else CASES)
)
async def test_ranks_give_the_tokens_of_transformers(tmp_path, family, size, width, level):
    reference = write_checkpoint(tmp_path, family)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    config = data_parallel(
        tmp_path,
        size,
        tensor_parallel_size=width,
        compilation_level=level,
        max_num_batched_tokens=8,
    )
    async with ranks_core(config) as ranks:
        # All other ranks are idle.
        assert await ranks.generate(PROMPTS[:1], greedy_with(max_tokens=NUM_TOKENS)) == expected[:1]
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        infos = ranks.core.worker.ranks
        places = [(each.data_parallel_rank, each.tensor_parallel_rank) for each in infos]
        assert places == [divmod(rank, width) for rank in range(size * width)]
        (layer, *_) = await ranks.core.expert_figures()
        num_step_tokens = ranks.core.counters.num_step_tokens
    # Padding is left out, and every token of every rank chooses experts in a layer.
    moe = ModelConfig.from_folder(tmp_path).moe
    assert sum(layer.expert_load) == moe.num_experts_per_tok * num_step_tokens


async def test_chunks_preemption_prefixes_and_graphs_together(tmp_path):
    reference = write_checkpoint(tmp_path, "deepseek_v3")
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    # 9 blocks of 4 tokens are too few for the requests of a rank.
    scarce = {"num_kv_blocks": 10, "max_num_batched_tokens": 8}
    async with ranks_core(data_parallel(tmp_path, **scarce, **GRAPHS)) as ranks:
        for _ in range(2):
            assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        assert await ranks.generate(PROMPTS[:1], greedy_with(max_tokens=NUM_TOKENS)) == expected[:1]
        stats = ranks.core.stats()
    assert stats.counters.scheduler.num_preemptions > 0
    assert stats.counters.scheduler.cached_tokens > 0
    assert stats.counters.steps_by_dispatch()["graph"] > 0
    assert not any(figures.fault for figures in stats.graphs.figures)
    assert stats.num_blocks == 2 * 9 + 1
    assert stats.load.num_used_blocks == 0
    assert [each.num_free_blocks for each in stats.rank_loads] == [9, 9]


async def test_compiled_ranks_capture_while_they_serve_and_experts_move(tmp_path):
    reference = write_checkpoint(tmp_path, "deepseek_v3")
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    graphs = GRAPHS | {"capture_while_serving": True, "cudagraph_mode": "full"}
    config = data_parallel(
        tmp_path, compilation_level=3, eplb_interval=4, num_redundant_experts=2, **graphs
    )
    async with ranks_core(config) as ranks:
        stats = ranks.core.stats()
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        await until(lambda: len(stats.graphs.figures) == stats.graphs.num_planned)
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
            tokens = await ranks.generate(prompts, greedy_with(max_tokens=NUM_TOKENS))
            assert tokens == expected[: len(prompts)]
        stats = ranks.core.stats()
    kinds = {each.key.kind for each in stats.graphs.figures if each.num_replays}
    assert kinds == {GraphKind.GRAPH_KIND_DECODE, GraphKind.GRAPH_KIND_MIXED}
    assert not any(figures.fault for figures in stats.graphs.figures)
    assert stats.counters.num_expert_moves > 0
    assert stats.counters.num_worker_restarts == 0


@pytest.mark.parametrize(
    ("width", "ranks_out"),
    [(1, (0, 1)), (1, (1,)), (2, (0, 1, 2, 3)), (2, (2, 3))],
    ids=["all", "rank 1", "all of four", "two of four"],
)
async def test_a_step_without_memory_costs_a_restart_only_where_ranks_differ(
    tmp_path, monkeypatch, width, ranks_out
):
    reference = write_checkpoint(tmp_path, "qwen3_moe")
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    use_odd_ranks(monkeypatch, odd_rank.runs_out_of_memory, *ranks_out)
    # However slow the machine is, the requests wait for the next worker.
    config = data_parallel(tmp_path, tensor_parallel_size=width, worker_patience_s=600)
    async with ranks_core(config) as ranks:
        monkeypatch.setenv("ODD_RANKS", "")  # the next worker is as it should be
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        num_failed = ranks.core.stats().counters.num_failed_steps
    is_alike = len(ranks_out) == 2 * width
    assert (len(ranks.executors), num_failed) == ((1, 1) if is_alike else (2, 0))


async def test_a_model_without_experts_is_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    assert "octavo serve --engines 2" in await start_error(data_parallel(tmp_path))


async def test_fused_kernels_that_are_impossible_are_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen3_moe")
    error = await start_error(data_parallel(tmp_path, all_reduce="fused"))
    assert re.search("fused is impossible: .*it takes GPUs", error)
