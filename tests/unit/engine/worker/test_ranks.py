"""Several ranks under the real scheduler: the tokens of one."""

import asyncio
import os

import pytest
import torch

from services.engine.batch import GraphKind
from services.engine.worker import failure_agreement
from tests.support import odd_rank
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.eagle3_checkpoints import write_eagle3_head
from tests.support.odd_rank import use_odd_ranks
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import greedy_continuations
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9], [5, 17, 3, 8]]
NUM_TOKENS = 8
FAMILIES = {
    "llama_one_kv_head": 2,
    "qwen3": 2,
    "qwen3_moe": 4,
    "mixtral": 2,
    "gpt_oss": 4,
    "glm4_moe": 2,
    "llama4": 2,
    "mimo_v2": 2,
    "minimax_m3": 4,
    "deepseek_v2": 2,
    "deepseek_v3": 4,
    "deepseek_v4": 2,
    "hy_v4": 2,
}
"""Family -> number of ranks."""
PRODUCT = bool(os.environ.get("OCTAVO_TEST_ALL_RANKS"))
"""Tries all families with all numbers of ranks."""
CASES = [
    (family, size)
    for family, chosen in FAMILIES.items()
    for size in (2, 4)
    if PRODUCT or size == chosen
]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(("family", "size"), CASES)
async def test_ranks_give_the_tokens_of_transformers(tmp_path, family, size):
    reference = write_checkpoint(tmp_path, family)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    config = ranks_config(tmp_path, tensor_parallel_size=size, max_num_batched_tokens=8)
    async with ranks_core(config) as ranks:
        tokens = await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS))
        assert [each.rank for each in ranks.core.worker.ranks] == list(range(size))
    assert tokens == expected


GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "capture_while_serving": False,
}


async def test_chunks_preemption_prefixes_and_graphs_together(tmp_path):
    reference = write_checkpoint(tmp_path, "qwen3")
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    # 9 blocks of 4 tokens are too few for all four requests.
    scarce = {"num_kv_blocks": 10, "max_num_batched_tokens": 8}
    config = ranks_config(tmp_path, tensor_parallel_size=2, **scarce, **GRAPHS)
    async with ranks_core(config) as ranks:
        for _ in range(2):
            assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        stats = ranks.core.stats()
        num_parameters = ranks.core.worker.num_parameters
    assert num_parameters == sum(each.numel() for each in reference.parameters())
    assert stats.counters.scheduler.num_preemptions > 0
    assert stats.counters.scheduler.cached_tokens > 0
    assert stats.counters.steps_by_dispatch()["graph"] > 0
    assert not any(figures.fault for figures in stats.graphs.figures)


@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
async def test_speculation(tmp_path, graphs):
    write_draft_checkpoint(tmp_path, agreement=0.7)
    outputs = []
    for size in (1, 2):
        config = ranks_config(
            tmp_path,
            tensor_parallel_size=size,
            num_speculative_tokens=2,
            min_speculative_tokens=2,
            **graphs,
        )
        async with ranks_core(config) as ranks:
            tokens = await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS))
            drafts = ranks.core.stats().counters.drafts
        outputs.append((tokens, drafts.num_verified, drafts.num_accepted))
    assert outputs[0] == outputs[1]
    assert 0 < drafts.num_accepted < drafts.num_verified


@pytest.mark.parametrize("way", ["ngram", "draft model", "eagle-3 head of 3 heads"])
async def test_drafts_that_the_model_does_not_make(tmp_path, way):
    write_checkpoint(tmp_path, "qwen3")
    how = {"draft_model": tmp_path}
    if way == "ngram":
        how = {"speculative_method": "ngram"}
    elif way != "draft model":
        how = {"draft_model": tmp_path / "head"}
        heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
        write_eagle3_head(tmp_path / "head", tmp_path, **heads)
    outputs = []
    for size, options in ((1, {}), (2, {"num_speculative_tokens": 2, **how})):
        config = ranks_config(tmp_path, tensor_parallel_size=size, **options)
        async with ranks_core(config) as ranks:
            outputs.append(await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)))
            num_verified = ranks.core.stats().counters.drafts.num_verified
    assert outputs[0] == outputs[1]
    assert num_verified


@pytest.mark.parametrize("level", [1, 2, 3] if PRODUCT else [3])
async def test_compiled_ranks_capture_while_they_serve(tmp_path, level):
    reference = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    graphs = GRAPHS | {"capture_while_serving": True}
    if level == 1:
        graphs["cudagraph_mode"] = "full_decode_only"
    config = ranks_config(
        tmp_path, tensor_parallel_size=2, compilation_level=level, use_inductor=False, **graphs
    )
    async with ranks_core(config) as ranks:
        stats = ranks.core.stats()
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        await until(lambda: len(stats.graphs.figures) == stats.graphs.num_planned)
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
    assert not any(figures.fault for figures in stats.graphs.figures)
    if level == 3:
        assert stats.graphs.pass_matches["all_reduce_norm"] > 0


def cold_start(folder, **layout):
    """Returns ranks that compile their model while they serve."""
    flags = GRAPHS | {"capture_while_serving": True, "cudagraph_capture_sizes": [4]}
    flags |= {"compilation_level": 3, "use_inductor": False, "compile_cache_dir": folder / "cache"}
    return ranks_config(folder, **flags, **layout)


@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["the other rank is late", "the rank that sends results is late"],
)
async def test_ranks_replay_provisional_graphs_until_all_have_compiled(
    tmp_path, monkeypatch, layout
):
    reference = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    gate = tmp_path / "gate"
    monkeypatch.setenv("ODD_GATE", str(gate))
    use_odd_ranks(monkeypatch, odd_rank.compiles_when_let, 1)
    async with ranks_core(cold_start(tmp_path, **layout)) as ranks:
        stats = ranks.core.stats()
        while not stats.counters.steps_by_dispatch().get("graph"):
            assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        assert stats.graphs.figures == []
        gate.touch()
        await until(lambda: len(stats.graphs.figures) == stats.graphs.num_planned)
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
    assert not any(figures.fault for figures in stats.graphs.figures)
    assert stats.graphs.pass_matches


async def test_a_model_that_one_rank_cannot_compile_runs_uncompiled_on_all(tmp_path, monkeypatch):
    reference = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    use_odd_ranks(monkeypatch, odd_rank.fails_to_compile, 1)
    async with ranks_core(cold_start(tmp_path, tensor_parallel_size=2)) as ranks:
        stats = ranks.core.stats()
        await until(lambda: len(stats.graphs.figures) == stats.graphs.num_planned)
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
    assert not any(figures.fault for figures in stats.graphs.figures)
    assert not stats.graphs.pass_matches


async def test_sampling_and_log_probabilities_are_those_of_one_rank(tmp_path):
    write_checkpoint(tmp_path, "gpt_oss")
    sampling = [
        greedy_with(max_tokens=8, temperature=0.9, seed=5, top_k=20, min_p=0.01),
        greedy_with(max_tokens=8, temperature=1.2, seed=6, top_p=0.9, logprobs=3),
        greedy_with(max_tokens=8, repetition_penalty=1.7, logprobs=2, prompt_logprobs=2),
        greedy_with(max_tokens=8, logit_bias=((96, 4.0),), presence_penalty=0.5),
    ]

    async def outputs(size):
        config = ranks_config(tmp_path, tensor_parallel_size=size, **GRAPHS)
        async with ranks_core(config) as ranks:
            pairs = zip(PROMPTS, sampling, strict=True)
            sinks = [ranks.submit(prompt, wishes) for prompt, wishes in pairs]
            for sink in sinks:
                assert (await sink.wait_for_end()).error is None
        return sinks

    one, two = await outputs(1), await outputs(2)
    for sink, other in zip(one, two, strict=True):
        assert sink.token_ids == other.token_ids
        for each, same in zip(logprobs_of(sink), logprobs_of(other), strict=True):
            assert each == pytest.approx(same, abs=1e-4)


def logprobs_of(sink):
    """The log-probability of each token of a request that asked for them."""
    return [entry.logprob for output in sink.outputs for entry in output.logprobs or ()]


async def test_one_ranks_verdict_of_a_graph_holds_for_all(tmp_path, monkeypatch):
    reference = write_checkpoint(tmp_path, "llama")
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    use_odd_ranks(monkeypatch, odd_rank.finds_faults, 1)
    graphs = GRAPHS | {"capture_while_serving": True}
    async with ranks_core(ranks_config(tmp_path, tensor_parallel_size=2, **graphs)) as ranks:
        await until(lambda: len(ranks.core.stats().graphs.figures) == 4)
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        figures = ranks.core.stats().graphs.figures
    faults = {each.fault for each in figures if each.key.kind == GraphKind.GRAPH_KIND_DECODE}
    assert faults == {"rank 1: a fault of one rank"}
    assert not any(each.fault for each in figures if each.key.kind != GraphKind.GRAPH_KIND_DECODE)


async def test_the_least_blocks_of_a_rank_are_those_of_all(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, "llama")
    use_odd_ranks(monkeypatch, odd_rank.has_few_blocks, 1)
    async with ranks_core(ranks_config(tmp_path, tensor_parallel_size=2)) as ranks:
        assert ranks.core.worker.num_blocks == 23
        assert [each.num_blocks for each in ranks.core.worker.ranks] == [64, 23]


@pytest.mark.parametrize("ranks_out", [(0, 1), (1,), (0,)], ids=["all", "rank 1", "rank 0"])
async def test_a_step_without_memory_costs_a_restart_only_where_ranks_differ(
    tmp_path, monkeypatch, ranks_out
):
    reference = write_checkpoint(tmp_path, "llama")
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    use_odd_ranks(monkeypatch, odd_rank.runs_out_of_memory, *ranks_out)
    if len(ranks_out) == 1:  # no other failure is to be waited for
        monkeypatch.setattr(failure_agreement, "AGREEMENT_GRACE_S", 0.1)
    async with ranks_core(ranks_config(tmp_path, tensor_parallel_size=2)) as ranks:
        generating = asyncio.create_task(
            ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS))
        )
        await until(
            lambda: len(ranks.executors) > 1 or ranks.core.stats().counters.num_failed_steps
        )
        monkeypatch.setenv("ODD_RANKS", "")
        assert await generating == expected
        assert (len(ranks.executors) == 1) == (len(ranks_out) == 2)
