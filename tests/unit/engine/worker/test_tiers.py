"""Ranks that share a model each keep their part of blocks, and bring it back together."""

import os
import signal

import pytest
import torch

from services.engine.kv_cache.recompute_rule import RecomputeRule
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core, start_error
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until

SIZES = {"num_kv_blocks": 24, "max_num_batched_tokens": 32, "max_model_len": 64}
GIGABYTES = 2**-10
LAYOUTS = {
    "one rank": {},
    "tensor parallel": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "data parallel": {"data_parallel_size": 2, "enable_expert_parallel": True},
}
DOCUMENTS = [[(start * 7 + i * i) % 90 for i in range(40)] for start in range(12)]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def loads_always(monkeypatch):
    """No time of computing is known, so everything is loaded, however slow the machine."""
    monkeypatch.setattr(RecomputeRule, "observe_prompts", lambda *_: None)


async def outputs(config) -> tuple[list[list[int]], int]:
    """Each document's continuation, twice, and the tokens that came back."""
    async with ranks_core(config) as ranks:
        tokens = []
        for prompt in (*DOCUMENTS, *DOCUMENTS):
            tokens += await ranks.generate([prompt], greedy_with(max_tokens=3))
        stats = ranks.core.stats()
        return tokens, stats.counters.scheduler.tiers.hit_tokens


@pytest.mark.usefixtures("loads_always")
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_ranks_bring_back_what_each_of_them_kept(tmp_path, layout):
    write_checkpoint(tmp_path, "qwen3_moe")
    flags = SIZES | LAYOUTS[layout]
    expected, none = await outputs(ranks_config(tmp_path, **flags))
    found, num_hits = await outputs(ranks_config(tmp_path, host_kv_gb=GIGABYTES, **flags))
    assert found == expected
    assert none == 0
    assert num_hits >= 12 * 32


async def test_the_next_worker_starts_with_an_empty_host(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    config = ranks_config(tmp_path, host_kv_gb=GIGABYTES, **SIZES)
    async with ranks_core(config) as ranks:
        expected = [
            (await ranks.generate([each], greedy_with(max_tokens=3)))[0] for each in DOCUMENTS
        ]
        assert ranks.core.stats().num_host_blocks
        sink = ranks.submit(DOCUMENTS[0], greedy_with(max_tokens=20))
        os.kill(ranks.executors[-1].pid, signal.SIGKILL)
        await until(lambda: len(ranks.executors) == 2 and ranks.core.is_ready, timeout_s=120)
        assert ranks.core.stats().num_host_blocks == 0
        await sink.wait_for_end()
        assert sink.token_ids[:3] == expected[0]
        for prompt, tokens in zip(DOCUMENTS, expected, strict=True):
            assert await ranks.generate([prompt], greedy_with(max_tokens=3)) == [tokens]


async def test_memory_for_less_than_a_block_is_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    error = await start_error(ranks_config(tmp_path, host_kv_gb=1e-9))
    assert "--host-kv-gb is 1e-09: a block has" in error


async def test_more_memory_than_there_is_is_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    error = await start_error(ranks_config(tmp_path, host_kv_gb=60000))
    assert "Lower --host-kv-gb" in error


def test_memory_for_blocks_that_no_request_finds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it must be 0 without --enable-prefix-caching"):
        ranks_config(tmp_path, host_kv_gb=1, enable_prefix_caching=False)
