"""A stage of two is killed or stopped at a random moment: the tokens go on, as with one rank."""

import asyncio
import os
import signal

import pytest

from tests.integration.faults.test_lost_rank import STEP_TIMEOUT_S, tokens_despite, tokens_of_all
from tests.support.processes import start_engine


@pytest.fixture(scope="module")
def expected():
    with start_engine(device="cpu") as engine:
        return asyncio.run(tokens_of_all(engine))


@pytest.fixture(scope="module")
def engine():
    with start_engine(
        pipeline_parallel_size=2, device="cpu", step_timeout_s=STEP_TIMEOUT_S
    ) as process:
        yield process


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
async def test_the_tokens_go_on_after_a_stage_is_lost(engine, expected, rank, number):
    tokens = await tokens_despite(engine, lambda pids: os.kill(pids[rank], number))
    assert tokens == expected
