"""The worker process at each level, from its flags to its tokens."""

import asyncio
from collections.abc import Iterator

import pytest
import torch

from protos.engine.v1.worker_pb2 import CompileReport, GraphReport
from services.engine.batch import read_int32
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.executor import WorkerExecutor
from services.engine.worker.rank_process import WorkerDiedError
from tests.support.forked_workers import workers_forked
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver, greedy_continuation

PROMPT = [5, 17, 3]


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    with workers_forked():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder, "qwen3", num_hidden_layers=1)


def config_of(folder, **flags):
    return EngineConfig.from_flags(
        model=folder,
        device="cpu",
        num_kv_blocks=64,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        use_inductor=False,
        log_level="warning",
        **{"capture_while_serving": False, "compile_cache_dir": folder / "cache", **flags},
    )


@pytest.mark.parametrize(
    ("flags", "compiles"),
    [
        ({"compilation_level": 0}, False),
        # It was traced before, or the first step would end the worker.
        ({"compilation_level": 1, "fail_on_late_build": True}, True),
        ({"compilation_level": 2}, True),
        ({"compilation_level": 3}, True),
        ({"compilation_level": 3, "enforce_eager": True}, False),
    ],
)
async def test_a_worker_compiles_as_configured_and_gives_the_same_tokens(
    checkpoint, flags, compiles
):
    folder, reference = checkpoint
    executor, driver, stages = WorkerExecutor(config_of(folder, **flags)), StepDriver(folder), []
    try:
        ready = await executor.start(stages.append)
        assert ("compiling the model" in stages) == compiles
        has_passes = compiles and flags["compilation_level"] > 1
        assert ready.compiled.pass_matches.get("linear_gate", 0) == (1 if has_passes else 0)
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


@pytest.mark.parametrize("level", [2, 3])
async def test_a_worker_serves_while_it_compiles_and_captures(checkpoint, tmp_path, level):
    folder, reference = checkpoint
    config = config_of(
        folder,
        compilation_level=level,
        capture_while_serving=True,
        compile_cache_dir=tmp_path,  # a first start
        cudagraph_mode="full_and_piecewise",
        cudagraph_capture_sizes=[2, 4],
    )
    executor, driver = WorkerExecutor(config), StepDriver(folder)
    tokens, reports = [], []
    try:
        ready = await executor.start()
        assert (len(ready.planned_graphs), len(ready.graphs)) == (4, 0)
        sequence = driver.add(PROMPT)
        executor.send(driver.descriptor([(sequence, 3)]))
        async with asyncio.timeout(60):
            while len(reports) < 4 or len(tokens) < 8:
                event = await executor.receive()
                if isinstance(event, GraphReport):
                    reports.append(event)
                    continue
                if isinstance(event, CompileReport):
                    compiled = event
                    continue
                tokens.append(int(read_int32(event.token_ids)[0]))
                if len(tokens) < 60:
                    executor.send(driver.descriptor([(sequence, 1)]))
    finally:
        await executor.stop()
    assert {report.fault for report in reports} == {""}
    assert not ready.compiled.pass_matches
    assert compiled.pass_matches["linear_gate"] == 1
    assert tokens == greedy_continuation(reference, PROMPT, len(tokens))


async def test_a_model_that_cannot_be_compiled_is_served_and_captured_as_it_is(checkpoint):
    config = config_of(
        checkpoint[0],
        compilation_level=3,
        capture_while_serving=True,
        cudagraph_mode="piecewise",
        cudagraph_capture_sizes=[4],
        splitting_ops=["octavo::unified_attention_with_output", "octavo::nothing"],
    )
    executor = WorkerExecutor(config)
    try:
        await executor.start()
        async with asyncio.timeout(60):
            report = await executor.receive()
    finally:
        await executor.stop()
    assert report.fault == ""
