"""Pipeline stages under the real scheduler: the tokens of one rank."""

import os

import pytest
import torch

from tests.support import odd_rank
from tests.support.odd_rank import use_odd_ranks
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core, start_error
from tests.support.step_driver import greedy_continuation, greedy_continuations
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9], [5, 17, 3, 8]]
NUM_TOKENS = 8
STAGES = {
    "two": {"pipeline_parallel_size": 2},
    "uneven": {"pipeline_parallel_size": 3, "pipeline_layers": [1, 3, 1]},
    "shared": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
FAMILIES = {
    "llama": "two",
    "qwen3": "uneven",
    "qwen3_moe": "shared",
    "gpt_oss": "uneven",
    "llama4": "two",
    "mimo_v2": "two",
    "glm4_moe": "two",
    "deepseek_v3": "shared",
    "gemma2": "two",
}
"""Family -> how its layers are split."""
PRODUCT = bool(os.environ.get("OCTAVO_TEST_ALL_RANKS"))
"""Tries all families with all splits."""
CASES = [
    (family, split)
    for family, chosen in FAMILIES.items()
    for split in STAGES
    if PRODUCT or split == chosen
]
GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "capture_while_serving": False,
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(("family", "split"), CASES)
async def test_stages_give_the_tokens_of_transformers(tmp_path, family, split):
    reference = write_checkpoint(tmp_path, family, num_hidden_layers=5)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    config = ranks_config(tmp_path, max_num_batched_tokens=8, **STAGES[split])
    async with ranks_core(config) as ranks:
        tokens = await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS))
        stages = [each.pipeline_parallel_rank for each in ranks.core.worker.ranks]
    assert tokens == expected
    size = config.parallel.tensor_parallel_size
    assert stages == [rank // size for rank in range(config.parallel.num_ranks)]


async def test_chunks_preemption_prefixes_and_graphs_together(tmp_path):
    reference = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=5)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    # 9 blocks of 4 tokens are too few for all four requests.
    scarce = {"num_kv_blocks": 10, "max_num_batched_tokens": 8}
    config = ranks_config(tmp_path, **STAGES["uneven"], **scarce, **GRAPHS)
    async with ranks_core(config) as ranks:
        for _ in range(2):
            assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        stats = ranks.core.stats()
    assert stats.counters.scheduler.num_preemptions > 0
    assert stats.counters.scheduler.cached_tokens > 0
    assert stats.counters.steps_by_dispatch()["graph"] > 0
    assert not any(figures.fault for figures in stats.graphs.figures)


@pytest.mark.parametrize("level", [1, 2, 3] if PRODUCT else [3])
async def test_compiled_stages_capture_while_they_serve(tmp_path, level):
    # Six like layers in the second stage: a few of them are traced for all.
    reference = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=8)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    graphs = GRAPHS | {"capture_while_serving": True}
    if level == 1:
        graphs["cudagraph_mode"] = "full_decode_only"
    config = ranks_config(
        tmp_path,
        pipeline_parallel_size=2,
        pipeline_layers=[2, 6],
        compilation_level=level,
        use_inductor=False,
        compile_cache_dir=tmp_path / "cache",
        **graphs,
    )
    async with ranks_core(config) as ranks:
        stats = ranks.core.stats()
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        await until(lambda: len(stats.graphs.figures) == stats.graphs.num_planned)
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
    assert not any(figures.fault for figures in stats.graphs.figures)
    if level == 3:
        assert stats.graphs.pass_matches["linear_residual"] > 0


async def test_copies_of_what_was_received_reach_the_pieces(tmp_path):
    reference = write_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    graphs = GRAPHS | {"cudagraph_mode": "piecewise", "cudagraph_copy_inputs": True}
    config = ranks_config(tmp_path, pipeline_parallel_size=2, compilation_level=3, **graphs)
    async with ranks_core(config) as ranks:
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        assert ranks.core.stats().counters.steps_by_dispatch()["graph"] > 0


async def test_sampling_and_log_probabilities_are_those_of_one_rank(tmp_path):
    write_checkpoint(tmp_path, "gemma2", num_hidden_layers=4)
    sampling = [
        greedy_with(max_tokens=8, temperature=0.9, seed=5, top_k=20),
        greedy_with(max_tokens=8, temperature=1.2, seed=6, top_p=0.9, logprobs=3),
        greedy_with(max_tokens=8, repetition_penalty=1.7, logprobs=2, prompt_logprobs=2),
        greedy_with(max_tokens=8, logit_bias=((96, 4.0),), presence_penalty=0.5),
    ]

    async def outputs(size):
        config = ranks_config(tmp_path, pipeline_parallel_size=size)
        async with ranks_core(config) as ranks:
            pairs = zip(PROMPTS, sampling, strict=True)
            sinks = [ranks.submit(prompt, wishes) for prompt, wishes in pairs]
            for sink in sinks:
                assert (await sink.wait_for_end()).error is None
        return [sink.token_ids for sink in sinks]

    assert await outputs(1) == await outputs(2)


@pytest.mark.parametrize("rank_out", [0, 1])
async def test_a_stage_without_memory_costs_a_restart(tmp_path, monkeypatch, rank_out):
    reference = write_checkpoint(tmp_path, "llama")
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    use_odd_ranks(monkeypatch, odd_rank.runs_out_of_memory, rank_out)
    async with ranks_core(ranks_config(tmp_path, pipeline_parallel_size=2)) as ranks:
        monkeypatch.setenv("ODD_RANKS", "")
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        assert len(ranks.executors) == 2


async def test_an_aborted_request_costs_the_others_nothing(tmp_path):
    reference = write_checkpoint(tmp_path, "llama")
    expected = greedy_continuation(reference, PROMPTS[0], NUM_TOKENS)
    async with ranks_core(ranks_config(tmp_path, pipeline_parallel_size=2)) as ranks:
        aborted = [ranks.submit(prompt, greedy_with(max_tokens=40)) for prompt in PROMPTS[1:]]
        kept = ranks.submit(PROMPTS[0], greedy_with(max_tokens=NUM_TOKENS))
        await until(lambda: all(sink.token_ids for sink in aborted))
        for sink in aborted:
            ranks.core.abort(sink.outputs[0].request)
        assert (await kept.wait_for_end()).error is None
        assert kept.token_ids == expected
        await until(lambda: ranks.core.stats().load.num_running == 0)


async def test_stages_that_cannot_hold_the_layers_are_refused(tmp_path):
    write_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    wrong = {"pipeline_parallel_size": 2, "pipeline_layers": [1, 1]}
    message = await start_error(ranks_config(tmp_path, **wrong))
    assert "stages of 1, 1 layers do not hold the model's 3 layers" in message
    message = await start_error(ranks_config(tmp_path, pipeline_parallel_size=4))
    assert "3 layers are too few for 4 pipeline stages" in message
