"""Drafts of data-parallel ranks: the tokens, and the guesses, of one rank."""

import os
import signal

import pytest
import torch

from services.engine.batch import GraphKind
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.eagle3_checkpoints import write_eagle3_head
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import greedy_continuations
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9], [5, 17, 3, 8], [7] * 20]
NUM_TOKENS = 12
GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "cudagraph_piece_sizes": [8, 32],
    "capture_while_serving": False,
}
THREE = {"num_speculative_tokens": 3, "min_speculative_tokens": 3}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def config(folder, size, **changes):
    return ranks_config(folder, data_parallel_size=size, **{"use_inductor": False} | changes)


async def counted(core):
    """Returns the numbers of verified and of accepted drafts, once no step is in flight."""
    await until(lambda: not core.load().step_age_s)
    drafts = core.stats().counters.drafts
    return drafts.num_verified, drafts.num_accepted


@pytest.mark.parametrize(
    ("variant", "num_draft_layers", "size", "options"),
    [
        ("deepseek_v3", 1, 2, GRAPHS),
        ("deepseek_v3", 2, 3, {"max_num_batched_tokens": 8}),
        ("glm4_moe", 1, 2, {"compilation_level": 3, "max_num_batched_tokens": 9}),
    ],
    ids=["graphs", "two layers", "compiled"],
)
async def test_draft_layers_guess_what_those_of_one_rank_guess(
    tmp_path, variant, num_draft_layers, size, options
):
    write_draft_checkpoint(tmp_path, variant, num_draft_layers=num_draft_layers, agreement=0.98)
    greedy, seen = greedy_with(max_tokens=NUM_TOKENS), []
    for each in (1, size):
        async with ranks_core(config(tmp_path, each, **THREE, **options)) as ranks:
            # All other ranks are idle.
            alone = await ranks.generate(PROMPTS[:1], greedy)
            figures = await counted(ranks.core)
            seen.append((await ranks.generate(PROMPTS, greedy), alone, figures))
            stats = ranks.core.stats()
    assert seen[0] == seen[1]
    assert 0 < stats.counters.drafts.num_accepted < stats.counters.drafts.num_verified
    if options is GRAPHS:
        replayed = {each.key.kind for each in stats.graphs.figures if each.num_replays}
        assert {GraphKind.GRAPH_KIND_DECODE, GraphKind.GRAPH_KIND_DRAFT} <= replayed
        assert not any(each.fault for each in stats.graphs.figures)


@pytest.mark.parametrize(("width", "level"), [(1, 3), (2, 0)])
async def test_preemption_moving_experts_and_a_lost_rank(tmp_path, width, level):
    write_draft_checkpoint(tmp_path, agreement=0.98)
    greedy = greedy_with(max_tokens=NUM_TOKENS)
    async with ranks_core(config(tmp_path, 1)) as ranks:
        expected = await ranks.generate(PROMPTS, greedy)
    # 9 blocks of 4 tokens are too few for a rank's requests.
    scarce = {"num_kv_blocks": 10, "max_num_batched_tokens": 8, "tensor_parallel_size": width}
    # However slow the machine is, the requests wait for the next worker.
    flags = {**THREE, **scarce, **GRAPHS, "compilation_level": level, "worker_patience_s": 600}
    flags["capture_while_serving"] = True
    async with ranks_core(config(tmp_path, 2, eplb_interval=3, **flags)) as ranks:
        assert await ranks.generate(PROMPTS, greedy) == expected
        figures = ranks.core.stats().graphs
        await until(lambda: len(figures.figures) == figures.num_planned)
        sinks = [ranks.submit(prompt, greedy) for prompt in PROMPTS]
        await until(lambda: any(sink.token_ids for sink in sinks))
        os.kill(ranks.core.worker.ranks[-1].pid, signal.SIGKILL)
        for sink, tokens in zip(sinks, expected, strict=True):
            await until(lambda sink=sink: sink.outputs and sink.outputs[-1].is_last, timeout_s=240)
            assert sink.outputs[-1].error is None
            assert sink.token_ids == tokens
        stats = ranks.core.stats()
        assert len(ranks.executors) == 2
    assert stats.counters.scheduler.num_preemptions > 0
    assert stats.counters.num_expert_moves > 0
    assert stats.load.num_used_blocks == 0
    assert not any(each.fault for each in (*figures.figures, *stats.graphs.figures))


@pytest.mark.parametrize("source", ["ngram", "draft model", "eagle3"])
async def test_drafts_that_need_no_other_rank(tmp_path, source):
    small = tmp_path / "small"
    reference = write_checkpoint(tmp_path, "qwen3_moe")
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    options = {"draft_model": small}
    if source == "ngram":
        options = {"speculative_method": "ngram"}
    elif source == "eagle3":
        write_eagle3_head(small, tmp_path)
        options |= GRAPHS
    else:
        write_checkpoint(small, "qwen3")
        options["min_speculative_tokens"] = 0  # the number of drafts adapts
    greedy = greedy_with(max_tokens=NUM_TOKENS)
    async with ranks_core(config(tmp_path, 2, **{**THREE, **options})) as ranks:
        assert await ranks.generate(PROMPTS[:1], greedy) == expected[:1]
        assert await ranks.generate(PROMPTS, greedy) == expected
        assert ranks.core.stats().counters.drafts.num_verified
