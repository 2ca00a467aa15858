"""Finds out, at a bounded price, whether a grammar can be compiled."""

import asyncio
import contextlib
import json
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import structlog

from services.engine.errors import InvalidRequestError, QueueFullError, UnsupportedError
from services.engine.request import StructuredOutput

log = structlog.get_logger()

NUM_PROBES = 2
START_TIMEOUT_S = 60.0
"""Time that a process has to start and read the tokenizer."""

RETRY_AFTER_MS = 1000
_IMPORT_ROOT = Path(__file__).resolve().parents[3]
_IS_GONE = (asyncio.IncompleteReadError, ConnectionError, RuntimeError)
"""What asking a process raises that is gone; uvloop raises RuntimeError for a closed pipe."""
_OUTSIDE_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Sent by operators and by a kernel that is short of memory; a crash sends others."""


class ProbePool:
    """Up to NUM_PROBES processes that compile grammars, one at a time each.

    No limit of the library bounds every grammar's time or memory ("multipleOf" a large prime takes
    minutes), and a thread cannot be ended. A process can: one that is too slow is killed.
    """

    def __init__(self, settings: dict[str, Any], *, timeout_s: float) -> None:
        """Starts no process before the first grammar.

        Args:
            settings: arguments of `make_tokenizer`.
            timeout_s: longest time for one grammar.
        """
        self._settings = settings
        self._timeout_s = timeout_s
        self._idle: list[asyncio.subprocess.Process] = []
        self._turns = asyncio.Semaphore(NUM_PROBES)
        self._working: set[asyncio.Task[str]] = set()

    async def check(self, wanted: StructuredOutput) -> str:
        """Returns the grammar of an output once it has compiled.

        Raises:
            InvalidRequestError: it is wrong, takes too long or too much memory.
            UnsupportedError: no grammar can be used with the model's tokenizer.
            QueueFullError: no process can be started now.
        """
        await self._turns.acquire()
        # A caller who leaves costs no process: the grammar is worked on to its end or time limit.
        work = asyncio.create_task(self._check(wanted))
        self._working.add(work)
        work.add_done_callback(self._end_turn)
        try:
            return await asyncio.shield(work)
        finally:
            del work  # an error refers to this frame, and the task to the error

    async def close(self) -> None:
        """Ends the processes."""
        for work in self._working:
            work.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        while self._idle:
            await _kill(self._idle.pop())

    def _end_turn(self, work: asyncio.Task[str]) -> None:
        self._working.discard(work)
        self._turns.release()
        if not work.cancelled():
            work.exception()  # seen, even if the caller has left

    async def _check(self, wanted: StructuredOutput) -> str:
        try:
            complaint, grammar = await self._ask_a_probe(wanted)
        except _ProbeKilledError:
            # That was not the grammar's doing, or once; a second time speaks against it.
            complaint, grammar = await self._ask_a_probe(wanted, is_last=True)
        if complaint:
            raise InvalidRequestError(complaint)
        return grammar

    async def _ask_a_probe(
        self, wanted: StructuredOutput, *, is_last: bool = False
    ) -> tuple[str, str]:
        """Returns a probe's complaint, or an empty one and the grammar."""
        probe = await self._take()
        is_usable = False
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await _ask(probe, {"kind": wanted.kind.value, "texts": wanted.texts})
            is_usable = True
        except TimeoutError:
            raise InvalidRequestError(
                f"the grammar takes more than {self._timeout_s} s to compile"
            ) from None
        except _IS_GONE:
            await _kill(probe)  # for its exit status
            if not is_last and -(probe.returncode or 0) in _OUTSIDE_SIGNALS:
                log.warning("grammar_probe_killed", exit_status=probe.returncode)
                raise _ProbeKilledError from None
            raise InvalidRequestError("the grammar takes too much memory to compile") from None
        finally:
            if is_usable:
                self._idle.append(probe)
            else:
                await _kill(probe)
        return answer

    async def _take(self) -> asyncio.subprocess.Process:
        """Returns a process that waits for a grammar."""
        while self._idle:
            probe = self._idle.pop()
            if probe.returncode is None and probe.stdin and not probe.stdin.is_closing():
                return probe
            log.warning("grammar_probe_killed", exit_status=probe.returncode)
            await _kill(probe)
        return await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            probe = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.engine.grammar.probe",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(_IMPORT_ROOT), "RAYON_NUM_THREADS": "1"},
            )
        except (OSError, RuntimeError) as error:  # no processes, memory or files are left
            raise _cannot_start(str(error)) from None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                complaint, _ = await _ask(probe, self._settings)
        except (TimeoutError, *_IS_GONE) as error:
            await _kill(probe)
            raise _cannot_start(f"it ended or was too slow: {error!r}") from None
        except BaseException:
            await _kill(probe)
            raise
        if complaint:
            await _kill(probe)
            log.warning("grammar_probe_failed", reason=complaint)
            raise UnsupportedError(f"structured output is not supported here: {complaint}")
        return probe


class _ProbeKilledError(Exception):
    """Something outside ended a process that compiled a grammar."""


def _cannot_start(reason: str) -> QueueFullError:
    log.warning("grammar_probe_failed", reason=reason)
    return QueueFullError(
        "the engine cannot start a process that compiles grammars now",
        retry_after_ms=RETRY_AFTER_MS,
    )


async def _ask(probe: asyncio.subprocess.Process, message: Any) -> tuple[str, str]:
    """Sends a message and returns the answer: a complaint, and a grammar where there is none."""
    assert probe.stdin is not None, "it was started with pipes"
    assert probe.stdout is not None, "it was started with pipes"
    content = json.dumps(message).encode()
    probe.stdin.write(struct.pack("<I", len(content)) + content)
    await probe.stdin.drain()
    [size] = struct.unpack("<I", await probe.stdout.readexactly(4))
    complaint, grammar = json.loads(await probe.stdout.readexactly(size))
    return complaint, grammar


async def _kill(probe: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        probe.kill()
    await probe.wait()
    if probe.stdin is not None:
        probe.stdin.close()
