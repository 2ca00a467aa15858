"""The worker process at each level, from its flags to its tokens."""

import asyncio

import pytest
import torch

from services.engine.batch import read_int32
from services.engine.config import EngineConfig
from services.engine.worker.executor import WorkerDiedError, WorkerExecutor
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver, greedy_continuation

PROMPT = [5, 17, 3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder, "qwen3")


def config_of(folder, **flags):
    return EngineConfig(
        model=folder,
        device="cpu",
        num_kv_blocks=64,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        use_inductor=False,
        log_level="warning",
        **flags,
    )


@pytest.mark.parametrize(
    ("flags", "compiles"),
    [
        ({"compilation_level": 0}, False),
        ({"compilation_level": 2}, True),
        ({"compilation_level": 3}, True),
        ({"compilation_level": 3, "enforce_eager": True}, False),
    ],
)
async def test_a_worker_compiles_as_told_and_gives_the_same_tokens(checkpoint, flags, compiles):
    folder, reference = checkpoint
    executor, driver, stages = WorkerExecutor(config_of(folder, **flags)), StepDriver(folder), []
    try:
        await executor.start(stages.append)
        assert ("compiling the model" in stages) == compiles
        sequence = driver.add(PROMPT)
        for num_tokens in (3, 1, 1):
            executor.send(driver.descriptor([(sequence, num_tokens)]))
        async with asyncio.timeout(60):
            results = [await executor.receive() for _ in range(3)]
    finally:
        await executor.stop()
    tokens = [int(read_int32(result.token_ids)[0]) for result in results]
    assert tokens == greedy_continuation(reference, PROMPT, 3)


async def test_a_worker_that_cannot_compile_says_why(checkpoint):
    config = config_of(checkpoint[0], compilation_level=3, splitting_ops=["octavo::nothing"])
    with pytest.raises(WorkerDiedError, match="octavo::nothing does not occur in the model"):
        await WorkerExecutor(config).start()
