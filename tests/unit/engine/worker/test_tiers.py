"""Ranks that share a model each keep their part of blocks, and bring it back together."""

import os
import signal

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from services.engine.kv_cache.recompute_rule import RecomputeRule
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
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


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A checkpoint, and each document's continuation in an engine that keeps none, twice."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3_moe")
    eager = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
    engine = GraphEngine(folder, eager, num_blocks=SIZES["num_kv_blocks"])
    tokens = [engine.run([prompt], 3)[0] for prompt in (*DOCUMENTS, *DOCUMENTS)]
    assert engine.scheduler.counts.tiers.hit_tokens == 0
    return folder, tokens


@pytest.mark.usefixtures("loads_always")
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_ranks_bring_back_what_each_of_them_kept(kept, layout):
    folder, expected = kept
    config = ranks_config(folder, host_kv_gb=GIGABYTES, **SIZES, **LAYOUTS[layout])
    async with ranks_core(config) as ranks:
        for prompt, tokens in zip((*DOCUMENTS, *DOCUMENTS), expected, strict=True):
            assert await ranks.generate([prompt], greedy_with(max_tokens=3)) == [tokens]
        tiers = ranks.core.stats().counters.scheduler.tiers
    assert tiers.hit_tokens >= 12 * 32


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
