"""A worker that cannot be started because the system is short of something is asked for again."""

import asyncio
import errno

import pytest

from protos.engine.v1.worker_pb2 import WorkerReady
from services.engine.core.stats import Counters
from services.engine.core.worker_supervisor import WorkerSupervisor


class Executor:
    """A worker that starts once its errors have run out."""

    pid = None

    def __init__(self, errors):
        self._errors = errors

    async def start(self, on_progress=None):
        del on_progress
        if self._errors:
            raise self._errors.pop(0)
        return WorkerReady()

    async def stop(self):
        pass


def supervisor(errors, served):
    async def serve(executor, ready):
        del executor, ready
        served.set()
        await asyncio.Event().wait()

    return WorkerSupervisor(
        make_executor=lambda: Executor(errors), serve=serve, counters=Counters()
    )


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
async def test_a_first_worker_without_process_or_memory_is_started_later(number):
    errors, served = [OSError(number, "short")] * 2, asyncio.Event()
    task = asyncio.create_task(supervisor(errors, served).run())
    async with asyncio.timeout(60):
        await served.wait()
    assert not errors
    task.cancel()
    await asyncio.wait({task})


async def test_a_first_worker_that_fails_otherwise_ends_the_engine():
    with pytest.raises(BrokenPipeError):
        await supervisor([BrokenPipeError(errno.EPIPE, "gone")], asyncio.Event()).run()
