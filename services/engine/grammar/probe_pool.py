"""Finds out, at a bounded price, whether a grammar can be compiled."""

import asyncio
import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import structlog

from services.engine.errors import InvalidRequestError, UnsupportedError
from services.processes.child import child_command

log = structlog.get_logger()

NUM_PROBES = 2
START_TIMEOUT_S = 60.0
"""Time that a process has to start and read the tokenizer."""

_IMPORT_ROOT = Path(__file__).resolve().parents[3]


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

    async def check(self, grammar: str) -> None:
        """Returns when a grammar has compiled.

        Raises:
            InvalidRequestError: it is wrong, takes too long or too much memory.
            UnsupportedError: no grammar can be used with the model's tokenizer.
        """
        async with self._turns:
            probe = self._idle.pop() if self._idle else await self._start()
            is_usable = False
            try:
                async with asyncio.timeout(self._timeout_s):
                    complaint = await _ask(probe, grammar)
                is_usable = True
            except TimeoutError:
                raise InvalidRequestError(
                    f"the grammar takes more than {self._timeout_s} s to compile"
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                raise InvalidRequestError("the grammar takes too much memory to compile") from None
            finally:
                if is_usable:
                    self._idle.append(probe)
                else:
                    await _kill(probe)
        if complaint:
            raise InvalidRequestError(f"the grammar is refused: {complaint}")

    async def close(self) -> None:
        """Ends the processes that nobody uses."""
        while self._idle:
            await _kill(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        probe = await asyncio.create_subprocess_exec(
            *child_command("services.engine.grammar.probe"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(_IMPORT_ROOT), "RAYON_NUM_THREADS": "1"},
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                complaint = await _ask(probe, self._settings)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            complaint = "the process that compiles grammars did not start"
        except BaseException:
            await _kill(probe)
            raise
        if complaint:
            await _kill(probe)
            log.warning("grammar_probe_failed", reason=complaint)
            raise UnsupportedError(f"structured output is not supported here: {complaint}")
        return probe


async def _ask(probe: asyncio.subprocess.Process, message: Any) -> str:
    """Sends a message and returns the answer."""
    assert probe.stdin is not None, "it was started with pipes"
    assert probe.stdout is not None, "it was started with pipes"
    content = json.dumps(message).encode()
    probe.stdin.write(struct.pack("<I", len(content)) + content)
    await probe.stdin.drain()
    [size] = struct.unpack("<I", await probe.stdout.readexactly(4))
    return str(json.loads(await probe.stdout.readexactly(size)))


async def _kill(probe: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        probe.kill()
    await probe.wait()
    if probe.stdin is not None:
        probe.stdin.close()
