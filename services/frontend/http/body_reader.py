"""Reads bodies: small ones on the event loop, others in a process of their own."""

import asyncio
import contextlib
import os
import pickle
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from functools import partial
from typing import Literal

import structlog

from services.frontend.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.frontend.http.body_worker import LENGTH, Refusal, Task
from services.frontend.http.calls import Call, ReadCall, read_chat, read_completion
from services.telemetry.counts import Counts, LocalCounts

Reader = Literal["completion", "chat"]

INLINE_BODY_BYTES = 2**20
"""Larger bodies are always read in the process: bytes alone take 5 ns each."""
INLINE_MARKS = 4096
"""Bodies with more marks of structure are read in the process: one may take 4 us on its own."""
MAX_WAITING_BYTES = 128 * 2**20
"""Bytes of all large bodies that are being read or wait; 15 MiB take up to 0.6 s of CPU."""
READ_TIMEOUT_S = 10.0
"""Longest time for one body in the process; the worst one takes 0.6 s of CPU."""
START_TIMEOUT_S = 30.0
"""Longest time until a new process is ready; busy machines are slow at it."""
RETRY_AFTER_MS = 1000
_MARKS = b"{[,:\\"
"""A body has at most as many values and keys as these; a backslash may hide one in a string."""
_WAITING = "large_body_bytes"
_WORKER = "services.frontend.http.body_worker"
_LOST = (EOFError, OSError, RuntimeError)
"""What reading from a process that ended raises, and writing to it; uvloop has RuntimeErrors."""
_READERS: dict[Reader, ReadCall] = {"completion": read_completion, "chat": read_chat}

log = structlog.get_logger()


class _WorkerLostError(Exception):
    """The process ended, or took too long."""


def is_small(body: bytes) -> bool:
    """Whether a body is read on the event loop: its values are few, whatever they are."""
    if len(body) > INLINE_BODY_BYTES:
        return False
    return len(body) - len(body.translate(None, delete=_MARKS)) <= INLINE_MARKS


class BodyReader:
    """Makes calls of bodies.

    Parsing and checking JSON holds the interpreter's lock, for seconds where a body has millions of
    values or errors. A process does both, one body at a time; what comes back is within the limits.
    It starts with the first large body, and again after it was lost.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_prompt_bytes: int,
        max_samples: int,
        counts: Counts | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            max_bytes: largest body that callers are to collect.
            max_prompt_bytes: longest prompt or conversation.
            max_samples: most outputs that one request may have.
            counts: holds the bytes of bodies that wait; None counts for this process alone.
        """
        self.max_bytes = max_bytes
        self._max_prompt_bytes = max_prompt_bytes
        self._max_samples = max_samples
        self._counts = counts or LocalCounts()
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._is_closed = False

    async def read(
        self, reader: Reader, body: bytes, request_id: str, *, max_prompt_tokens: int
    ) -> Call:
        """Returns the call that a body is.

        Args:
            reader: what reads it.
            body: the body.
            request_id: names the request.
            max_prompt_tokens: token ids of a prompt from which on it is refused.

        Raises:
            InvalidRequestError: it cannot be served as it is, or takes too long to read.
            OverloadedError: too many large bodies wait.
            EngineUnavailableError: the process that reads large bodies cannot be used now.
        """
        if is_small(body):
            return _READERS[reader](body, request_id)
        if not self._counts.take(_WAITING, len(body), limit=MAX_WAITING_BYTES):
            raise OverloadedError(
                f"{self._counts.held(_WAITING)} bytes of large bodies wait to be read;"
                f" the limit is {MAX_WAITING_BYTES}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        task = Task(
            reader=reader,
            request_id=request_id,
            max_prompt_bytes=self._max_prompt_bytes,
            max_prompt_tokens=max_prompt_tokens,
            max_samples=self._max_samples,
            timeout_s=READ_TIMEOUT_S + 1,
            num_bytes=len(body),
        )
        # A caller that goes away must not leave its answer to be read by the next one.
        reading = asyncio.create_task(self._read_in_turn(task, body))
        reading.add_done_callback(partial(self._end_reading, len(body)))
        answer = await asyncio.shield(reading)
        if isinstance(answer, Refusal):
            raise InvalidRequestError(answer.message, field=answer.field)
        return answer

    async def close(self) -> None:
        """Ends the process."""
        self._is_closed = True
        await self._kill()

    def _end_reading(self, num_bytes: int, reading: "asyncio.Task[Call | Refusal]") -> None:
        self._counts.give_back(_WAITING, num_bytes)
        if not reading.cancelled():
            reading.exception()  # its caller may be gone

    async def _read_in_turn(self, task: Task, body: bytes) -> Call | Refusal:
        async with self._turn:
            try:
                if self._process is not None:
                    with contextlib.suppress(_WorkerLostError):
                        return await self._ask(self._process, task, body)
                # There was none, or it may have been lost for an earlier body's sake.
                return await self._ask(await self._spawn(), task, body)
            except TimeoutError:
                raise InvalidRequestError(
                    f"the body takes over {READ_TIMEOUT_S:g} s to read"
                ) from None
            except (_WorkerLostError, *_LOST) as error:
                log.warning("body_process_lost", error=type(error).__name__)
                raise EngineUnavailableError(
                    "the body could not be read: the process for large bodies was lost",
                    retry_after_ms=RETRY_AFTER_MS,
                ) from None

    async def _spawn(self) -> Process:
        if self._is_closed:
            raise _WorkerLostError
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", _WORKER),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # what it would say there may hold prompts
            limit=2**20,
            # Our environment may hold secrets; only where modules are is told.
            env={
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        try:
            async with self._in_time(START_TIMEOUT_S):
                await _receive(process)
        except TimeoutError:
            raise _WorkerLostError from None
        return process

    async def _ask(self, process: Process, task: Task, body: bytes) -> Call | Refusal:
        """Sends a body and returns the answer.

        Raises:
            TimeoutError: it takes too long.
            _WorkerLostError: the process ended.
        """
        assert process.stdin is not None, "a pipe"
        head = pickle.dumps(task)
        async with self._in_time(READ_TIMEOUT_S):
            process.stdin.write(LENGTH.pack(len(head)) + head)
            process.stdin.write(body)
            await process.stdin.drain()
            answer = await _receive(process)
        call: Call | Refusal = pickle.loads(answer)
        return call

    @contextlib.asynccontextmanager
    async def _in_time(self, timeout_s: float) -> AsyncIterator[None]:
        """Ends the process unless it answers in time.

        Raises:
            TimeoutError: it takes too long.
            _WorkerLostError: the process ended.
        """
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except BaseException as error:
            await self._kill()
            if isinstance(error, TimeoutError) or not isinstance(error, _LOST):
                raise
            raise _WorkerLostError from None

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _receive(process: Process) -> bytes:
    """Returns one message of the process."""
    assert process.stdout is not None, "a pipe"
    [length] = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return await process.stdout.readexactly(length)
