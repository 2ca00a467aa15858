"""Starts of several ranks that fail, by the executor's word."""

import asyncio
from collections.abc import Iterator

import pytest
import torch

from services.engine.worker.executor import WorkerExecutor
from tests.support import odd_rank
from tests.support.forked_workers import workers_forked
from tests.support.odd_rank import use_odd_ranks
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, start_error


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    with workers_forked():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, "llama", hidden_size=48, num_attention_heads=6)
    return path


async def test_a_rank_that_never_starts_is_named(folder, monkeypatch):
    use_odd_ranks(monkeypatch, odd_rank.never_starts, 1)
    monkeypatch.setenv("ODD_MEETING_LIMIT_S", "0.5")
    config = ranks_config(folder, tensor_parallel_size=2)
    assert "rank 1 did not begin within 0.5 s of rank 0" in await start_error(config)


async def test_a_rank_that_never_starts_is_named_at_the_end_of_a_short_start(folder, monkeypatch):
    use_odd_ranks(monkeypatch, odd_rank.never_starts, 0)
    config = ranks_config(folder, tensor_parallel_size=2, worker_start_timeout_s=0.5)
    message = await start_error(config)
    assert message.startswith("rank 0")
    assert message.endswith("was not ready within 0.5 s")


async def test_a_rank_that_starts_slowly_is_waited_for(folder, monkeypatch):
    use_odd_ranks(monkeypatch, odd_rank.starts_slowly, 1)
    executor = WorkerExecutor(ranks_config(folder, tensor_parallel_size=2))
    try:
        async with asyncio.timeout(120):
            ready = await executor.start()
        assert [each.tensor_parallel_rank for each in ready.ranks] == [0, 1]
    finally:
        await executor.stop()


async def test_ranks_with_different_checkpoints_are_refused(folder, monkeypatch):
    use_odd_ranks(monkeypatch, odd_rank.has_another_checkpoint, 1)
    message = await start_error(ranks_config(folder, tensor_parallel_size=2))
    assert "rank 1 has another checkpoint than rank 0: of something else, not" in message


async def test_heads_that_ranks_cannot_share_are_refused(folder):
    message = await start_error(ranks_config(folder, tensor_parallel_size=4))
    assert "6 attention heads cannot be shared equally by 4 ranks" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
async def test_a_list_of_gpus_on_a_machine_without_one_is_refused(folder):
    config = ranks_config(folder, device="auto", tensor_parallel_size=2, devices=[0, 1])
    assert "--devices lists GPUs, and this machine has none" in await start_error(config)


@pytest.mark.parametrize("size", [1, 2])
async def test_a_fused_all_reduce_that_is_impossible_is_refused_in_a_line(folder, size):
    wished = ranks_config(folder, tensor_parallel_size=size, all_reduce="fused")
    error = await start_error(wished)
    assert "--all-reduce fused is impossible: " in error
    assert "it takes" in error
    assert "Traceback" not in error
