import asyncio
import contextlib
import os
import signal
import stat
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from services.engine.batch import read_int32
from services.engine.config.engine_config import EngineConfig
from services.engine.worker import rank_process
from services.engine.worker.executor import WorkerExecutor
from services.engine.worker.rank_process import WorkerDiedError
from tests.support.forked_workers import workers_forked
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver, greedy_continuation
from tests.support.waiting import until

PROMPT = [5, 17, 3]


@pytest.fixture(autouse=True)
def timeouts(monkeypatch):
    """Gives a worker that hung up time to end, however slow the machine is."""
    monkeypatch.setattr(rank_process, "STOP_GRACE_S", 60.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder, "qwen3")


@pytest.fixture
def config(checkpoint):
    return EngineConfig.from_flags(
        model=checkpoint[0],
        device="cpu",
        num_kv_blocks=64,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        log_level="warning",
    )


@pytest.fixture
async def executor(config):
    executor = WorkerExecutor(config)
    yield executor
    await executor.stop()


@pytest.fixture
def forked():
    """For tests of what a worker says, not of how its process starts and ends."""
    with workers_forked():
        yield


@pytest.fixture
def driver(checkpoint):
    """Builds descriptors; its own runner stays unused."""
    return StepDriver(checkpoint[0])


@pytest.mark.usefixtures("forked")
async def test_steps_sent_ahead_come_back_in_order(executor, driver, checkpoint):
    stages = []
    ready = await executor.start(stages.append)
    assert (ready.num_blocks, ready.device_name, ready.dtype) == (64, "cpu", "float32")
    assert ready.block_bytes == 2 * 2 * 2 * 12 * 4 * 4  # k+v, layers, heads, head_dim, block, fp32
    assert ready.num_parameters > 0
    assert "loading weights" in stages
    sequence = driver.add(PROMPT)
    for num_tokens in (3, 1, 1):
        executor.send(driver.descriptor([(sequence, num_tokens)]))
    results = [await executor.receive() for _ in range(3)]
    assert [result.step_id for result in results] == [1, 2, 3]
    tokens = [int(read_int32(result.token_ids)[0]) for result in results]
    assert tokens == greedy_continuation(checkpoint[1], PROMPT, 3)


def folder_of_sockets(pid):
    """Leaves a socket's file as a killed worker does; returns what says if the folder is there."""
    folder = Path(psutil.Process(pid).environ()["TMPDIR"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / f"symm_mem-{pid}").touch()
    return folder.exists


async def test_a_killed_worker_ends_a_pending_receive_and_can_be_started_again(executor, driver):
    await executor.start()
    receiving = asyncio.create_task(executor.receive())
    await asyncio.sleep(0)
    first_pid = executor.pid
    has_folder = folder_of_sockets(first_pid)
    os.kill(first_pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await receiving
    assert executor.pid is None
    executor.send(driver.descriptor([(driver.add(PROMPT), 3)]))
    await executor.stop()
    assert not has_folder()
    with workers_forked():
        await executor.start()
    assert executor.pid not in (None, first_pid)


@pytest.mark.usefixtures("forked")
async def test_a_bad_descriptor_ends_the_worker_with_the_reason(executor, driver):
    await executor.start()
    descriptor = driver.descriptor([(driver.add(PROMPT), 3)])
    descriptor.attn_metadata.max_seqlen_k = 99
    executor.send(descriptor)
    with pytest.raises(WorkerDiedError, match=r"in step 1: ValueError: .*max_seqlen_k is 99"):
        await executor.receive()
    with pytest.raises(WorkerDiedError, match="exited with code 1"):
        await executor.receive()


@pytest.mark.usefixtures("forked")
async def test_a_start_without_a_checkpoint_fails_with_the_reason(config, tmp_path):
    executor = WorkerExecutor(config.with_flags(model=tmp_path))
    with pytest.raises(WorkerDiedError, match=r"while starting: .*config\.json cannot be read"):
        await executor.start()
    assert executor.pid is None


async def test_a_start_that_takes_too_long_is_given_up(config):
    executor = WorkerExecutor(config.with_flags(worker_start_timeout_s=0.05))
    with pytest.raises(WorkerDiedError, match=r"not ready within 0\.05 s"):
        await executor.start()
    assert executor.pid is None


def descriptors():
    """Descriptors that this process holds open, by the kernel's names."""
    found = Counter()
    for descriptor in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):
            found[descriptor.readlink()] += 1
    return found


async def test_ctrl_c_is_ignored_and_stop_ends_the_process_and_leaves_no_descriptor(config, driver):
    before = descriptors()
    executor = WorkerExecutor(config)
    await executor.stop()
    await executor.start()
    worker = psutil.Process(executor.pid)
    os.kill(executor.pid, signal.SIGINT)  # Ctrl-C belongs to the service
    executor.send(driver.descriptor([(driver.add(PROMPT), 3)]))
    assert (await executor.receive()).step_id == 1
    await executor.stop()
    await executor.stop()
    assert not worker.is_running()
    assert executor.pid is None
    assert descriptors() <= before
    with pytest.raises(WorkerDiedError, match="stopped"):
        await executor.receive()


async def test_a_worker_dies_with_its_service(config):
    program = (
        "import asyncio, sys\n"
        "from services.engine.config.engine_config import EngineConfig\n"
        "from services.engine.worker.executor import WorkerExecutor\n"
        "async def main():\n"
        "    executor = WorkerExecutor(EngineConfig.model_validate_json(sys.argv[1]))\n"
        "    await executor.start()\n"
        "    print(executor.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, config.model_dump_json(), stdout=asyncio.subprocess.PIPE
    )
    worker = psutil.Process(int(await service.stdout.readline()))
    service.kill()
    await service.wait()
    await until(lambda: has_ended(worker), timeout_s=60)


def has_ended(process):
    """Whether a process is gone, or waits to be reaped."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_service_side_imports_no_torch():
    program = "import services.engine.worker.executor, sys; sys.exit('torch' in sys.modules)"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", program) == 0
