"""The processes that compile grammars end, hang, or cannot be started."""

import asyncio
import errno
import os
import signal
from contextlib import asynccontextmanager

import pytest

from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.errors import InvalidRequestError, QueueFullError
from services.engine.grammar.probe_pool import NUM_PROBES, ProbePool
from services.engine.structured_output import GrammarKind, StructuredOutput
from tests.support.started_processes import note_started_processes
from tests.support.waiting import until

MODEL = ModelFolder.open(TINY_CHECKPOINT, name="tiny", max_model_len=None)
HOSTILE = StructuredOutput(
    GrammarKind.JSON_SCHEMA, ('{"type": "integer", "multipleOf": 99999989}',)
)


def regex(text):
    return StructuredOutput(GrammarKind.REGEX, (text,))


@asynccontextmanager
async def running_pool():
    settings = {
        "tokenizer_json": MODEL.tokenizer_json.decode(),
        "vocab_size": MODEL.vocab_size,
        "eos_token_ids": sorted(MODEL.eos_token_ids),
    }
    pool = ProbePool(settings, timeout_s=60.0)
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture
def started(monkeypatch):
    """The processes that are started, oldest first."""
    return note_started_processes(monkeypatch)


async def test_a_process_that_ended_while_idle_is_replaced(started):
    async with running_pool() as pool:
        await pool.check(regex("a"))
        os.kill(started[0].pid, signal.SIGKILL)
        assert "b" in await pool.check(regex("b"))  # whether its end is noticed yet or not
        os.kill(started[1].pid, signal.SIGKILL)
        await started[1].wait()
        assert "c" in await pool.check(regex("c"))
        assert len(started) == 3


async def test_a_process_that_is_killed_at_work_is_replaced_once(started):
    async with running_pool() as pool:
        await pool.check(regex("a"))
        work = asyncio.create_task(pool.check(HOSTILE))
        await until(lambda: not pool._pool._idle)
        os.kill(started[0].pid, signal.SIGKILL)
        await until(lambda: len(started) == 2)
        os.kill(started[1].pid, signal.SIGKILL)
        with pytest.raises((InvalidRequestError, QueueFullError)):
            await work  # it was killed at work, or while it started
        assert len(started) == 2
        await pool.check(regex("b"))


async def test_a_grammar_that_makes_its_process_crash_is_tried_twice_and_refused(started):
    async with running_pool() as pool:
        await pool.check(regex("a"))
        work = asyncio.create_task(pool.check(HOSTILE))
        await until(lambda: not pool._pool._idle)
        os.kill(started[0].pid, signal.SIGABRT)  # as a process without memory ends
        await until(lambda: len(started) == 2)
        os.kill(started[1].pid, signal.SIGABRT)
        with pytest.raises((InvalidRequestError, QueueFullError)):
            await work  # it crashed at work, or while it started
        assert len(started) == 2


@pytest.mark.parametrize(
    "shortage", [OSError(errno.EAGAIN, "no process"), RuntimeError("can't start new thread")]
)
async def test_where_no_process_can_be_started_the_request_may_come_again(monkeypatch, shortage):
    async def refuse(*arguments, **options):
        raise shortage

    async with running_pool() as pool:
        with monkeypatch.context() as context:
            context.setattr(asyncio, "create_subprocess_exec", refuse)
            for _ in range(2 * NUM_PROBES):
                with pytest.raises(QueueFullError, match="could not be started"):
                    await pool.check(regex("a"))
        assert "a" in await pool.check(regex("a"))


async def test_callers_that_leave_cost_no_process_and_no_turn(started):
    async with running_pool() as pool:
        await pool.check(regex("a"))
        for i in range(4 * NUM_PROBES):
            work = asyncio.create_task(pool.check(regex(f"a{{{i}}}b")))
            await asyncio.sleep(0)
            work.cancel()
        assert "z" in await pool.check(regex("z"))
        assert len(started) <= NUM_PROBES
