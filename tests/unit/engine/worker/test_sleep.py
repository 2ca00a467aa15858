"""Sleep under the real scheduler and workers: the same tokens after waking."""

import os
import signal

import psutil
import pytest
import torch

from services.engine.core.sleep import SleepMode
from services.engine.errors import EngineUnavailableError, SleepError
from tests.support.adapters import linear_modules, merged_model, random_factors, write_adapter
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import greedy_continuations
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [5, 17, 3, 8, 2, 7, 1]]
NUM_TOKENS = 10
TIMEOUT_S = 60.0
WAIT, RECOMPUTE = SleepMode.WAIT, SleepMode.RECOMPUTE
SAMPLING = greedy_with(max_tokens=NUM_TOKENS)
GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "capture_while_serving": False,
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def expected_tokens(model, num_tokens=NUM_TOKENS):
    return greedy_continuations(model, PROMPTS, num_tokens)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("llama_tied", GRAPHS),
        ("qwen3", {"tensor_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"data_parallel_size": 2}),
        ("gemma2", {"num_kv_blocks": 40}),
        ("qwen3", {"num_kv_blocks": 12, "host_kv_gb": 0.001}),
        ("qwen3_next", {"num_kv_blocks": 200}),
    ],
)
async def test_tokens_are_the_same_after_waking_from_both_levels(tmp_path, family, options):
    expected = expected_tokens(write_checkpoint(tmp_path, family))
    async with ranks_core(ranks_config(tmp_path, enable_sleep=True, **options)) as ranks:
        core = ranks.core
        assert await ranks.generate(PROMPTS, SAMPLING) == expected
        for level in (1, 2):
            report = await core.sleep.fall_asleep(level, WAIT, TIMEOUT_S)
            assert report.num_bytes > 0
            assert not core.stats().num_cached_blocks
            with pytest.raises(EngineUnavailableError, match="asleep"):
                ranks.submit(PROMPTS[0], SAMPLING)
            assert (await core.sleep.wake()).num_bytes == report.num_bytes
            assert await ranks.generate(PROMPTS, SAMPLING) == expected
        assert len(ranks.executors) == 1


@pytest.mark.parametrize("level", [1, 2])
async def test_running_requests_are_computed_again_after_waking(tmp_path, level):
    num_tokens = 40
    expected = expected_tokens(write_checkpoint(tmp_path, "qwen3"), num_tokens)
    config = ranks_config(tmp_path, enable_sleep=True, tensor_parallel_size=2)
    async with ranks_core(config) as ranks:
        sinks = [ranks.submit(each, greedy_with(max_tokens=num_tokens)) for each in PROMPTS]
        for sink in sinks:
            await sink.wait_for(lambda each: len(each.token_ids) > 2)
        await ranks.core.sleep.fall_asleep(level, RECOMPUTE, TIMEOUT_S)
        assert ranks.core.load().num_waiting == len(PROMPTS)
        await ranks.core.sleep.wake()
        for sink in sinks:
            assert (await sink.wait_for_end()).error is None
        assert [sink.token_ids for sink in sinks] == expected


async def test_adapters_and_drafts_of_a_small_model_are_right_after_waking(tmp_path):
    base, small, adapter = tmp_path / "base", tmp_path / "small", tmp_path / "adapter"
    model = write_checkpoint(base, "qwen3")
    write_checkpoint(small, "llama", num_hidden_layers=1)
    factors = random_factors(linear_modules(model, without=("lm_head",)), seed=1, size=0.2)
    write_adapter(adapter, factors)
    plain, adapted = expected_tokens(model), expected_tokens(merged_model(model, factors))
    config = ranks_config(
        base, enable_sleep=True, draft_model=small, num_speculative_tokens=2, lora=[f"a={adapter}"]
    )
    async with ranks_core(config) as ranks:
        for level in (1, 2):
            assert await ranks.generate(PROMPTS, SAMPLING) == plain
            assert await ranks.generate(PROMPTS, SAMPLING, adapters=["a"] * 3) == adapted
            await ranks.core.sleep.fall_asleep(level, WAIT, TIMEOUT_S)
            await ranks.core.sleep.wake()
        assert await ranks.generate(PROMPTS, SAMPLING, adapters=["a"] * 3) == adapted
        assert await ranks.generate(PROMPTS, SAMPLING) == plain


async def test_a_rank_killed_asleep_is_replaced_when_the_engine_wakes(tmp_path):
    expected = expected_tokens(write_checkpoint(tmp_path, "qwen3"))
    config = ranks_config(tmp_path, enable_sleep=True, tensor_parallel_size=2)
    async with ranks_core(config) as ranks:
        pids = [rank.pid for rank in ranks.core.stats().ranks]
        await ranks.core.sleep.fall_asleep(1, WAIT, TIMEOUT_S)
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda: not any(map(psutil.pid_exists, pids)))
        assert ranks.core.stats().sleep_state == "asleep"
        assert len(ranks.executors) == 1
        await ranks.core.sleep.wake()
        assert len(ranks.executors) == 2
        assert await ranks.generate(PROMPTS, SAMPLING) == expected


async def test_level_two_is_refused_once_the_checkpoint_has_changed(tmp_path):
    expected = expected_tokens(write_checkpoint(tmp_path, "qwen3"))
    async with ranks_core(ranks_config(tmp_path, enable_sleep=True)) as ranks:
        config = (tmp_path / "config.json").read_text()
        (tmp_path / "config.json").write_text(config + " ")
        with pytest.raises(SleepError, match="has changed since it was loaded"):
            await ranks.core.sleep.fall_asleep(2, WAIT, TIMEOUT_S)
        assert await ranks.generate(PROMPTS, SAMPLING) == expected
        await ranks.core.sleep.fall_asleep(1, WAIT, TIMEOUT_S)
        await ranks.core.sleep.wake()
        assert await ranks.generate(PROMPTS, SAMPLING) == expected


async def test_the_workers_memory_falls_by_weights_and_cache(tmp_path):
    write_checkpoint(
        tmp_path,
        "qwen3",
        vocab_size=20_000,
        hidden_size=512,
        head_dim=256,
        max_position_embeddings=2048,
    )
    config = ranks_config(
        tmp_path, enable_sleep=True, num_kv_blocks=700, max_num_batched_tokens=1024,
        max_model_len=2048, block_size=4,
    )  # fmt: skip
    async with ranks_core(config) as ranks:
        worker = psutil.Process(ranks.core.stats().ranks[0].pid)
        assert ranks.core.worker is not None
        # Every block is written once.
        await ranks.generate([range(i, i + 340) for i in range(8)], greedy_with(max_tokens=2))
        num_cache_bytes = ranks.core.worker.block_bytes * 690
        num_weight_bytes = 4 * ranks.core.worker.num_parameters
        for level, num_freed in ((1, num_cache_bytes), (2, num_cache_bytes + num_weight_bytes)):
            awake = worker.memory_info().rss - worker.memory_info().shared
            await ranks.core.sleep.fall_asleep(level, WAIT, TIMEOUT_S)
            asleep = worker.memory_info().rss - worker.memory_info().shared
            assert awake - asleep > 0.9 * num_freed, (level, awake, asleep, num_freed)
            await ranks.core.sleep.wake()
            await ranks.generate([range(i, i + 340) for i in range(8)], greedy_with(max_tokens=2))
