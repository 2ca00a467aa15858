"""Which workers are started again, and after how long a pause."""

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


async def test_the_stage_of_a_start_and_its_fault_are_known_until_a_worker_serves():
    seen = []

    class Starting(Executor):
        async def start(self, on_progress=None):
            seen.append(supervised.progress)
            on_progress("rank 1: loading weights")
            seen.append(supervised.progress)
            return await super().start(on_progress)

    async def serve(executor, ready):
        del executor, ready
        seen.append(supervised.progress)
        raise asyncio.CancelledError

    errors = [OSError(errno.ENOMEM, "short")]
    supervised = WorkerSupervisor(
        make_executor=lambda: Starting(errors), serve=serve, counters=Counters()
    )
    stage, fault = "rank 1: loading weights", str(errors[0])
    with pytest.raises(asyncio.CancelledError):
        await supervised.run()
    assert seen == ["", stage, fault, stage, ""]


class Clock:
    """Time that passes when workers serve and the supervisor sleeps."""

    def __init__(self):
        self.now_s = 0.0
        self.pauses_s = []

    def __call__(self):
        return self.now_s

    async def sleep(self, seconds):
        self.pauses_s.append(seconds)
        self.now_s += seconds


async def pauses_between(lives_s):
    """Returns the pauses after workers that were lost after such times."""
    clock, left = Clock(), list(lives_s)

    async def serve(executor, ready):
        del executor, ready
        if not left:
            raise asyncio.CancelledError
        clock.now_s += left.pop(0)
        raise ConnectionError

    supervised = WorkerSupervisor(
        make_executor=lambda: Executor([]),
        serve=serve,
        counters=Counters(),
        clock=clock,
        sleep=clock.sleep,
    )
    with pytest.raises(asyncio.CancelledError):
        await supervised.run()
    return clock.pauses_s


async def test_the_pause_grows_while_workers_are_lost_at_once_and_ends_with_one_that_serves():
    assert await pauses_between([1.0] * 10) == [0.1 * 2**number for number in range(7)] + [10.0] * 3
    assert await pauses_between([1.0, 1.0, 25.0, 25.0, 1.0]) == [0.1, 0.2, 0.1, 0.1, 0.2]
