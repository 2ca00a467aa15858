"""Workers that find nothing in Triton's cache, and workers that find all of it."""

import asyncio
import json

import pytest

from services.engine.batch import read_int32
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.executor import WorkerExecutor
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver

pytestmark = pytest.mark.gpu

PROMPT = [44, 2, 9, 9, 31, 60, 7, 8, 1, 90]
NUM_DECODED = 4


def config_of(folder, **changes):
    return EngineConfig.from_flags(
        model=folder,
        device="cuda",
        dtype="float32",
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=128,
        kv_cache_memory_mb=32,  # other processes share the GPU
        capture_while_serving=False,
        log_format="json",
        **changes,
    )


async def generate(config, driver):
    """Starts a worker, has it run a prompt and some decodes, and returns their tokens."""
    executor, tokens = WorkerExecutor(config), []
    try:
        await executor.start()
        if driver is None:
            return tokens
        sequence = driver.add(PROMPT)
        for num_tokens in (len(PROMPT), *[1] * NUM_DECODED):
            executor.send(driver.descriptor([(sequence, num_tokens)]))
        for _ in range(1 + NUM_DECODED):
            tokens.append(int(read_int32((await executor.receive()).token_ids)[0]))
    finally:
        await executor.stop()
    return tokens


def events(text):
    """Returns the lines of a worker's log by event."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {line["event"]: line for line in lines}


def kept(cache):
    """Returns the files of built kernels; a number in a name is a process that writes it."""
    return sorted(cache.rglob("*.cubin"))


@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_start_without_kernels_builds_each_once_and_serves_the_same(
    tmp_path, monkeypatch, capfd, variant
):
    folder, cache = tmp_path / "checkpoint", tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    drafting = variant == "deepseek_v3"
    if drafting:
        write_draft_checkpoint(folder, variant, agreement=0.98)
    else:
        write_checkpoint(folder, variant)
    config = config_of(folder, num_speculative_tokens=2 if drafting else 0)
    capfd.readouterr()

    cold = asyncio.run(generate(config, None if drafting else StepDriver(folder)))
    log = events(capfd.readouterr().err)
    built = kept(cache)
    assert "kernels_left_to_build" not in log
    assert log["kernels_built"]["num_kernels"] > 5
    assert log["later_kernels_built"]["num_kernels"] > 5
    assert len(built) >= sum(log[f"{n}_built"]["num_kernels"] for n in ("kernels", "later_kernels"))

    warm = asyncio.run(generate(config, None if drafting else StepDriver(folder)))
    log = events(capfd.readouterr().err)
    assert "worker_ready" in log
    assert not {"kernel_missing", "kernels_built", "later_kernels_built"} & set(log)
    assert kept(cache) == built
    if not drafting:
        alone = StepDriver(folder)
        expected = alone.add(PROMPT)
        alone.decode([expected], 1 + NUM_DECODED)
        assert cold == warm == expected.output
