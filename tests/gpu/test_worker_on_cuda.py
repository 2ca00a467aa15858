import asyncio

import numpy as np
import pytest
import torch

from services.engine.batch import read_float32, read_int32
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.executor import WorkerExecutor
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver, sampling

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12]]
NUM_OUTPUT = 12
DRAWN = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 5}
EDITED = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "logit_bias": ((7, 2.0), (8, -100.0)),
    "min_tokens": 6,
    "end_token_ids": frozenset([3, 41]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3")
    return folder


def outputs(driver, params):
    """Runs the prompts through prefill, a chunk, mixed steps, a preemption and decode."""
    first, second, third = (driver.add(prompt, params) for prompt in PROMPTS)
    driver.step([(first, 3)])
    driver.step([(first, 1), (second, 4), (third, 1)])
    driver.step([(second, 6), (third, 1), (first, 1)])
    driver.preempt(third)
    driver.decode([second, first], 3)
    driver.decode([first, third, second], NUM_OUTPUT)
    return [each.output[:NUM_OUTPUT] for each in (first, second, third)]


@pytest.mark.parametrize("params", [{}, DRAWN, EDITED, DRAWN | EDITED])
def test_tokens_are_those_of_the_cpu_in_fp32(folder, params):
    on_cpu = outputs(StepDriver(folder), sampling(**params))
    on_cuda = outputs(StepDriver(folder, device="cuda"), sampling(**params))
    assert on_cuda == on_cpu


def test_a_row_forgets_the_biases_of_its_last_owner(folder):
    plain = StepDriver(folder, device="cuda")
    expected = plain.add(PROMPTS[1])
    plain.decode([expected], 4)
    driver = StepDriver(folder, device="cuda", max_num_seqs=2)
    first = driver.add(PROMPTS[0], sampling(logit_bias=((7, 100.0),)))
    driver.decode([first], 2)
    driver.free_rows.append(first.row)
    heir = driver.add(PROMPTS[1])
    other = driver.add(PROMPTS[0], sampling(logit_bias=((8, 100.0),)))
    driver.decode([heir, other], 4)
    assert heir.output == expected.output
    assert other.output == [8] * 4


def test_bfloat16_is_finite_and_close_to_fp32_on_the_cpu(folder):
    logprobs = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        driver = StepDriver(folder, device=device, dtype=dtype)
        result = driver.step([(driver.add(PROMPTS[1], sampling(logprobs=5)), 10)])
        logprobs.append(read_float32(result.top_logprobs))
    assert np.isfinite(logprobs[1]).all()
    np.testing.assert_allclose(logprobs[1], logprobs[0], atol=0.25)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("params", [{}, DRAWN, EDITED, {"logprobs": 5}])
def test_a_steady_decode_step_never_waits_for_the_device(folder, params):
    driver = StepDriver(folder, device="cuda")
    sequences = [driver.add(prompt, sampling(**params)) for prompt in PROMPTS]
    driver.decode(sequences, 3)
    launched = []
    try:
        torch.cuda.set_sync_debug_mode("error")
        # Enough steps for every sequence to get a new block on the way.
        launched += [driver.launch([(each, 1) for each in sequences]) for _ in range(8)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in launched:
        driver.collect(step)
    undisturbed = StepDriver(folder)
    expected = [undisturbed.add(prompt, sampling(**params)) for prompt in PROMPTS]
    undisturbed.decode(expected, 11)
    assert [each.output for each in sequences] == [each.output for each in expected]


def test_a_result_becomes_ready_without_being_waited_for(folder):
    driver = StepDriver(folder, device="cuda")
    launched = driver.launch([(driver.add(PROMPTS[1]), 10)])
    torch.cuda.synchronize()
    assert launched.pending.is_ready


def test_the_worker_process_sizes_its_cache_and_runs_ahead(folder):
    asyncio.run(run_ahead(folder))


async def run_ahead(folder):
    free, total = torch.cuda.mem_get_info()
    utilization = min(0.98, 1.25 - free / total)  # of other processes, which may grow
    config = EngineConfig.from_flags(
        model=folder,
        device="cuda",
        dtype="float32",
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        gpu_memory_utilization=utilization,
        capture_while_serving=False,
    )
    driver = StepDriver(folder)
    sequence = driver.add(PROMPTS[1])
    executor = WorkerExecutor(config)
    try:
        ready = await executor.start()
        assert ready.device_name == torch.cuda.get_device_name()
        share = utilization * total
        assert 2**20 < ready.num_blocks * ready.block_bytes < share
        for num_tokens in (10, 1, 1, 1):
            executor.send(driver.descriptor([(sequence, num_tokens)]))
        tokens = [int(read_int32((await executor.receive()).token_ids)[0]) for _ in range(4)]
    finally:
        await executor.stop()
    alone = StepDriver(folder)
    expected = alone.add(PROMPTS[1])
    alone.decode([expected], 4)
    assert tokens == expected.output
