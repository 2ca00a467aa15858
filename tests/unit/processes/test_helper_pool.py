"""A helper process may hang, crash or not start; each costs one question at most."""

import asyncio
import contextlib
import gc
import os
import signal
from pathlib import Path

import psutil
import pytest

from services.processes.errors import (
    HelperBrokenError,
    HelperBusyError,
    HelperOpeningError,
    HelperRefusalError,
    HelperUnavailableError,
)
from services.processes.helper_pool import HelperPool
from tests.support.child_processes import children_that_run
from tests.support.waiting import until

HELPER = "tests.support.odd_helper"
SHORT_S = 0.2
"""Limit of questions that never get an answer."""


@contextlib.asynccontextmanager
async def running(opening: bytes = b"", **settings):
    pool = HelperPool(HELPER, opening, start_timeout_s=60, **settings)
    try:
        yield pool
    finally:
        await pool.close()
        await until(lambda: not children(), pause_s=0.02)


async def ask(
    pool: HelperPool, question: bytes, *, timeout_s: float = 60, wait_s: float = 60
) -> bytes:
    return await pool.ask(question, timeout_s=timeout_s, wait_s=wait_s, max_answer_bytes=2**20)


def children() -> list[int]:
    return [child.pid for child in children_that_run(HELPER)]


async def test_questions_are_answered_each_with_its_own_answer():
    async with running(num_processes=2) as pool:
        words = [b"%d" % number * 1000 for number in range(50)]
        assert await asyncio.gather(*(ask(pool, b"echo " + word) for word in words)) == words
        assert len(children()) == 2


async def test_a_megabyte_goes_both_ways():
    async with running() as pool:
        assert await ask(pool, b"echo " + bytes(2**20)) == bytes(2**20)


async def test_a_refusal_keeps_the_process():
    async with running() as pool:
        before = await ask(pool, b"pid")
        with pytest.raises(HelperRefusalError, match=r"^not this$"):
            await ask(pool, b"refuse not this")
        assert await ask(pool, b"pid") == before


async def test_what_a_library_prints_is_no_answer():
    async with running() as pool:
        assert await ask(pool, b"print and answer") == b"and answer"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_process_that_dies_between_questions_costs_none(number):
    async with running() as pool:
        for _ in range(3):
            os.kill(int(await ask(pool, b"pid")), number)
            assert await ask(pool, b"echo on") == b"on"


async def test_signals_that_end_its_service_do_not_end_it():
    async with running() as pool:
        pid = int(await ask(pool, b"pid"))
        assert os.getsid(pid) == pid  # the terminal's do not reach it, even while it starts
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        assert int(await ask(pool, b"pid")) == pid


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (b"exit 3", HelperBrokenError),
        (b"kill 9", HelperUnavailableError),
        (b"kill 11", HelperBrokenError),
        (b"fill 1048577", HelperBrokenError),
        (b"fill 1073741824", HelperBrokenError),
    ],
)
async def test_a_question_that_ends_its_process_is_asked_no_more_than_twice(question, error):
    async with running() as pool:
        with pytest.raises(error):
            await ask(pool, question)
        assert await ask(pool, b"echo on") == b"on"
        with pytest.raises(error):
            await ask(pool, question)
        assert await ask(pool, b"echo on") == b"on"


async def test_a_question_without_answer_is_given_up_and_its_process_ended():
    async with running() as pool:
        pid = int(await ask(pool, b"pid"))
        with pytest.raises(HelperBrokenError, match=r"took over 0\.2 s"):
            await ask(pool, b"hang", timeout_s=SHORT_S)
        assert not psutil.pid_exists(pid)
        assert await ask(pool, b"echo on") == b"on"


async def test_a_stopped_process_is_ended_too():
    async with running() as pool:
        os.kill(int(await ask(pool, b"pid")), signal.SIGSTOP)
        with pytest.raises(HelperBrokenError):
            await ask(pool, b"echo on", timeout_s=SHORT_S)
        assert await ask(pool, b"echo on") == b"on"


async def test_a_question_that_finds_no_free_process_is_refused_in_time():
    async with running() as pool:
        hanging = asyncio.create_task(ask(pool, b"hang", timeout_s=2))
        await until(children, pause_s=0.02)
        with pytest.raises(HelperBusyError):
            await ask(pool, b"echo", wait_s=0)
        with pytest.raises(HelperBrokenError):
            await hanging


async def test_a_caller_that_goes_away_leaves_no_answer():
    async with running() as pool:
        before = await ask(pool, b"pid")
        leaving = asyncio.create_task(ask(pool, b"echo old"))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await ask(pool, b"echo new") == b"new"
        assert await ask(pool, b"pid") == before


@pytest.mark.parametrize("num_asked", [1, 3])
async def test_the_end_of_the_pool_does_not_wait_for_questions_without_callers(num_asked):
    async with running() as pool:
        if num_asked > 1:  # the first of them finds a process
            await ask(pool, b"echo")
        leaving = [
            asyncio.create_task(ask(pool, b"hang", timeout_s=10**6, wait_s=10**6))
            for _ in range(num_asked)
        ]
        await until(children, pause_s=0.02)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)


async def test_the_end_of_the_pool_waits_for_the_end_of_a_process_that_took_too_long():
    async with running() as pool:  # an event loop opens files of its own for the first one
        await ask(pool, b"echo")
    num_open = psutil.Process().num_fds()
    async with running(b"fork") as pool:
        leaving = asyncio.create_task(ask(pool, b"hang", timeout_s=SHORT_S))
        await until(children, pause_s=0.02)
        leaving.cancel()
        # It was killed, and another process keeps its pipes open.
        await until(lambda: not children(), pause_s=0.02)
    assert psutil.Process().num_fds() <= num_open


async def test_the_end_of_the_pool_waits_for_questions_with_callers():
    async with running() as pool:
        asked = asyncio.create_task(ask(pool, b"echo " + bytes(2**19)))
        await until(children, pause_s=0.02)
    assert await asked == bytes(2**19)


async def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch):
    async with running() as pool:
        with monkeypatch.context() as patch:
            patch.setattr("sys.executable", "/nowhere/python")
            num_open = psutil.Process().num_fds()
            for _ in range(3):
                with pytest.raises(HelperUnavailableError, match="could not be started"):
                    await ask(pool, b"echo on")
            gc.collect()  # the errors' stacks hold the pipes
            await until(lambda: psutil.Process().num_fds() < num_open + 20)
        assert await ask(pool, b"echo on") == b"on"


async def test_a_refused_opening_is_the_answer_to_each_question():
    async with running(b"refuse") as pool:
        with pytest.raises(HelperOpeningError, match=r"^no opening$"):
            await pool.start()
        with pytest.raises(HelperOpeningError, match=r"^no opening$"):
            await ask(pool, b"echo")


async def test_a_process_that_ends_while_it_opens_is_unavailable():
    async with running(b"exit") as pool:
        with pytest.raises(HelperUnavailableError, match="ended while it started"):
            await pool.start()


async def test_a_closed_pool_starts_no_process():
    async with running() as pool:
        await pool.start()
    with pytest.raises(HelperUnavailableError, match="closed"):
        await ask(pool, b"echo")
    assert not children()


async def test_a_process_gets_no_variables_but_its_own(monkeypatch):
    monkeypatch.setenv("OCTAVO_SECRET", "hidden")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    async with running(environment={"TZ": "UTC"}) as pool:
        variables = (await ask(pool, b"variables")).decode().split()
    assert set(variables) <= {"PYTHONPATH", "PYTHONSAFEPATH", "LC_CTYPE", "TZ"}


async def test_a_process_writes_no_files(tmp_path):
    async with running() as pool:
        with pytest.raises(HelperBrokenError):
            await ask(pool, b"write " + bytes(tmp_path / "file"))


@pytest.mark.parametrize("num_bytes", [2**16 - 6, 2**16, 2**20])
async def test_long_messages_go_both_ways_through_memory(num_bytes):
    async with running(memory_bytes=2**20) as pool:
        before = await ask(pool, b"pid")
        for letter in (b"a", b"b"):
            text = letter * (num_bytes - 5)
            assert await ask(pool, b"echo " + text) == text
        assert await ask(pool, b"pid") == before


async def test_a_message_that_memory_cannot_hold_goes_through_the_pipe():
    async with running(memory_bytes=2**17) as pool:
        assert await ask(pool, b"echo " + bytes(2**18)) == bytes(2**18)


@pytest.mark.parametrize("num_bytes", [2**16, 2**17 + 1, 2**30])
async def test_an_answer_that_is_not_in_memory_costs_its_question(num_bytes):
    async with running(memory_bytes=2**17) as pool:
        with pytest.raises(HelperBrokenError, match="broke down"):
            await pool.ask(
                b"claim %d" % (num_bytes if num_bytes > 2**16 else 5),
                timeout_s=60,
                wait_s=60,
                max_answer_bytes=2**40,
            )
        assert await ask(pool, b"echo x") == b"x"


async def test_a_helper_cannot_change_the_size_of_memory():
    async with running(memory_bytes=2**17) as pool:
        assert await ask(pool, b"shrink") == b"refused"
        assert await ask(pool, b"echo " + b"x" * 2**16) == b"x" * 2**16


def num_memories() -> int:
    """Returns how many parts of helpers' memory this process has, in any form."""
    count = Path("/proc/self/maps").read_text().count("octavo-messages")
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            count += "octavo-messages" in str(each.readlink())
    return count


async def test_the_memory_of_a_process_ends_with_it(monkeypatch):
    """Collections of garbage are rare, and a hostile file can end a process every second."""
    gc.collect()
    before = num_memories()
    gc.disable()
    try:
        async with running(memory_bytes=2**17) as pool:
            for _ in range(3):
                with pytest.raises(HelperBrokenError):
                    await ask(pool, b"claim 5")
            assert num_memories() == before
            assert await ask(pool, b"echo x") == b"x"

        async def no_process(*_, **__):
            raise OSError

        monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
        async with running(memory_bytes=2**17) as pool:
            with pytest.raises(HelperUnavailableError):
                await ask(pool, b"echo x")
        assert num_memories() == before
    finally:
        gc.enable()
