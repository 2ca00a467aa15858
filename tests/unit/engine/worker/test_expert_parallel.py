"""Ranks that hold whole experts, under the real scheduler: the tokens of one rank."""

import os
import signal

import pytest
import torch

from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core, start_error
from tests.support.step_driver import greedy_continuation, greedy_continuations
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9], [5, 17, 3, 8]]
NUM_TOKENS = 8
PRODUCT = bool(os.environ.get("OCTAVO_TEST_ALL_RANKS"))
"""Tries all families with all numbers of ranks on all levels."""
CASES = {
    ("qwen3_moe", 2, 0),
    ("mixtral", 2, 1),
    ("gpt_oss", 4, 0),
    ("glm4_moe", 2, 3),
    ("llama4", 2, 3),
    ("mimo_v2", 4, 0),
    ("minimax_m3", 2, 3),
    ("deepseek_v3", 4, 2),
    ("hy_v4", 2, 3),
}
"""Family, number of ranks, compilation level. Mixtral's 5 experts fit no number of ranks."""
ALL_CASES = {
    (family, size, level) for family, _, _ in CASES for size in (2, 4) for level in range(4)
}
GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "capture_while_serving": False,
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def expert_parallel(folder, size, **changes):
    options = {"tensor_parallel_size": size, "enable_expert_parallel": True, "use_inductor": False}
    return ranks_config(folder, **options | changes)


@pytest.mark.parametrize(("family", "size", "level"), sorted(ALL_CASES if PRODUCT else CASES))
async def test_ranks_give_the_tokens_of_transformers(tmp_path, family, size, level):
    reference = write_checkpoint(tmp_path, family)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    config = expert_parallel(tmp_path, size, compilation_level=level, max_num_batched_tokens=8)
    async with ranks_core(config) as ranks:
        tokens = await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS))
    assert tokens == expected


async def test_graphs_and_copies_of_experts(tmp_path):
    reference = write_checkpoint(tmp_path, "qwen3_moe")
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    config = expert_parallel(tmp_path, 2, num_redundant_experts=3, **GRAPHS)
    async with ranks_core(config) as ranks:
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        stats = ranks.core.stats()
    assert stats.counters.steps_by_dispatch()["graph"] > 0
    assert not any(figures.fault for figures in stats.graphs.figures)


async def test_stages_report_the_experts_of_the_last(tmp_path):
    reference = write_checkpoint(tmp_path, "qwen3_moe")
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    async with ranks_core(expert_parallel(tmp_path, 2, pipeline_parallel_size=2)) as ranks:
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        (layer,) = await ranks.core.expert_figures()
    assert sum(layer.expert_load) > 0


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        ("qwen3_moe", 2, GRAPHS),
        ("mixtral", 2, {"compilation_level": 1, "capture_while_serving": False}),
        ("gpt_oss", 4, {"num_redundant_experts": 3, "compilation_level": 3}),
    ],
)
async def test_experts_move_between_steps(tmp_path, family, size, options):
    reference = write_checkpoint(tmp_path, family)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    config = expert_parallel(tmp_path, size, eplb_interval=4, **options)
    async with ranks_core(config) as ranks:
        before = await ranks.core.expert_figures()
        for _ in range(4):
            assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        after = await ranks.core.expert_figures()
        stats = ranks.core.stats()
    assert stats.counters.num_expert_moves > 0
    assert stats.counters.num_worker_restarts == 0
    assert stats.counters.num_late_builds == 0
    assert any(new.placement != old.placement for new, old in zip(after, before, strict=True))
    for layer, earlier in zip(after, before, strict=True):
        num_choices = sum(layer.expert_load) - sum(earlier.expert_load)
        # Padding of graphs is counted, too.
        assert num_choices >= 2 * stats.counters.num_step_tokens
        assert sum(layer.placement.rank_loads(layer.expert_load)) == pytest.approx(
            sum(layer.expert_load)
        )


async def test_a_rank_that_is_lost_between_moves_costs_no_token(tmp_path):
    reference = write_checkpoint(tmp_path, "qwen3_moe")
    prompt, num_tokens = PROMPTS[0], 50
    expected = greedy_continuation(reference, prompt, num_tokens)
    async with ranks_core(expert_parallel(tmp_path, 2, eplb_interval=1)) as ranks:
        sink = ranks.submit(prompt, greedy_with(max_tokens=num_tokens))
        await until(lambda: ranks.core.counters.num_expert_moves)
        os.kill(ranks.core.worker.ranks[1].pid, signal.SIGKILL)
        assert (await sink.wait_for_end()).error is None
        assert len(ranks.executors) == 2
        figures = await ranks.core.expert_figures()
    assert sink.token_ids == expected
    assert all(layer.placement.num_ranks == 2 for layer in figures)


async def test_speculation_while_experts_move(tmp_path):
    write_draft_checkpoint(tmp_path, agreement=0.7)
    outputs = []
    drafts = {"num_speculative_tokens": 2, "min_speculative_tokens": 2}
    for size, interval in ((1, 0), (2, 2)):
        config = expert_parallel(tmp_path, size, eplb_interval=interval, **drafts, **GRAPHS)
        async with ranks_core(config) as ranks:
            tokens = await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS))
            counters = ranks.core.stats().counters
        outputs.append((tokens, counters.drafts.num_verified, counters.drafts.num_accepted))
    assert outputs[0] == outputs[1]
    assert 0 < counters.drafts.num_accepted < counters.drafts.num_verified
    assert counters.num_expert_moves > 0


async def test_a_model_without_experts_is_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    error = await start_error(expert_parallel(tmp_path, 2))
    assert "--enable-expert-parallel needs a model with" in error


async def test_more_copies_than_fit_are_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen3_moe")
    error = await start_error(expert_parallel(tmp_path, 2, num_redundant_experts=9))
    assert "at most 8 copies of 8 experts" in error
