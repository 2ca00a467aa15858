"""Processes that are asked one question at a time, and that may hang, crash or not start at all.

For work on hostile input that no thread may do: a thread cannot be ended, holds Python's lock, and
shares the service's memory. `helper_program` is the helper's side.
"""

import asyncio
import os
import sys
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import structlog

from services.processes.errors import (
    HelperBrokenError,
    HelperBusyError,
    HelperOpeningError,
    HelperRefusalError,
    HelperUnavailableError,
)
from services.processes.helper_link import HelperLink, LinkLostError

_MAX_REFUSAL_BYTES = 2**16
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Without them some builds of Python do not start."""

_Result = TypeVar("_Result")

log = structlog.get_logger()


class HelperPool:
    """Up to `num_processes` processes that run one module.

    A process that takes too long is killed. If a process died between two questions, the next
    question is asked again in a new process. If a caller goes away, its question is still answered
    and the answer dropped, unless the pool is closed first.
    """

    def __init__(
        self,
        module: str,
        opening: bytes,
        *,
        num_processes: int = 1,
        start_timeout_s: float,
        environment: Mapping[str, str] | None = None,
        memory_bytes: int = 0,
    ) -> None:
        """Starts no process yet.

        Args:
            module: what a process runs; it calls `helper_program.run_helper`.
            opening: the first message to each process, such as the tokenizer it needs.
            num_processes: most processes at a time. They start when they are needed.
            start_timeout_s: longest time until a new process has taken its opening message.
            environment: variables of the processes. They get no other ones: ours may be secret.
            memory_bytes: longest message that goes through memory instead of a pipe; 0 for none.
        """
        self._module = module
        self._opening = opening
        self._start_timeout_s = start_timeout_s
        self._memory_bytes = memory_bytes
        self._environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **{name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            **(environment or {}),
        }
        self._turns = asyncio.Semaphore(num_processes)
        self._num_processes = num_processes
        self._idle: list[HelperLink] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._without_caller: set[asyncio.Task[Any]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Starts one process, so that the first question need not wait for it.

        Raises:
            HelperOpeningError: the process refuses its opening message.
            HelperUnavailableError: it could not be started.
        """
        await self._run(self._start_one())

    async def ask(
        self, question: bytes, *, timeout_s: float, wait_s: float, max_answer_bytes: int
    ) -> bytes:
        """Asks a question and returns its answer.

        Args:
            question: what the module's function takes.
            timeout_s: longest time for the answer; the start of a process does not count.
            wait_s: longest time to wait until a process is free.
            max_answer_bytes: a process that sends more is killed.

        Raises:
            HelperError: there is no answer; see `services.processes.errors`.
        """
        return await self._run(self._ask(question, timeout_s, wait_s, max_answer_bytes))

    async def close(self) -> None:
        """Ends the processes, after the questions whose callers wait. Later ones are refused."""
        self._is_closed = True
        for task in self._without_caller:
            task.cancel()
        for _ in range(self._num_processes):
            await self._turns.acquire()
        try:
            while self._idle:
                await self._kill(self._idle.pop())
            # Of questions that were cancelled above.
            await asyncio.gather(*self._ending)
        finally:
            for _ in range(self._num_processes):
                self._turns.release()

    async def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Finishes `work` even if the caller goes away, so that no answer is left unread."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                self._without_caller.add(task)
            raise

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._without_caller.discard(task)
        # asyncio logs an error that no caller takes, and it may hold words of the question.
        if not task.cancelled():
            task.exception()

    async def _start_one(self) -> None:
        async with self._turns:
            self._idle.append(await self._open())

    async def _ask(
        self, question: bytes, timeout_s: float, wait_s: float, max_answer_bytes: int
    ) -> bytes:
        try:
            async with asyncio.timeout(wait_s):
                await self._turns.acquire()
        except TimeoutError:
            raise HelperBusyError("is busy with other requests") from None
        try:
            link = self._take_idle()
            if link is not None:
                try:
                    return await self._ask_one(link, question, timeout_s, max_answer_bytes)
                except LinkLostError as error:
                    # It may have died before the question, which deserves a new one then.
                    log.warning("helper_process_lost", module=self._module, reason=str(error))
            link = await self._open()
            try:
                return await self._ask_one(link, question, timeout_s, max_answer_bytes)
            except LinkLostError as error:
                if error.is_killed_from_outside:
                    raise HelperUnavailableError(str(error)) from None
                raise HelperBrokenError("broke down") from None
        finally:
            self._turns.release()

    def _take_idle(self) -> HelperLink | None:
        """Returns a process that waits for a question, None if a new one is needed."""
        if self._is_closed:
            raise HelperUnavailableError("was closed")
        while self._idle:
            link = self._idle.pop()
            if link.is_alive:
                return link
            log.warning("helper_process_lost", module=self._module, reason="it died while idle")
        return None

    async def _open(self) -> HelperLink:
        """Starts a process and sends it the opening message."""
        if self._is_closed:
            raise HelperUnavailableError("was closed")
        try:
            link = await HelperLink.start(
                self._module, self._environment, memory_bytes=self._memory_bytes
            )
        except (OSError, RuntimeError) as error:  # uvloop raises both
            log.warning("helper_process_not_started", module=self._module, reason=repr(error))
            raise HelperUnavailableError("could not be started") from None
        is_open = False
        try:
            _, refusal = await link.ask(
                self._opening, timeout_s=self._start_timeout_s, max_answer_bytes=_MAX_REFUSAL_BYTES
            )
            is_open = refusal is None
        except TimeoutError:
            raise HelperUnavailableError(
                f"did not start within {self._start_timeout_s:g} s"
            ) from None
        except LinkLostError as error:
            log.warning("helper_process_not_started", module=self._module, reason=str(error))
            raise HelperUnavailableError("ended while it started") from None
        finally:
            if not is_open:
                await self._kill(link)
        if refusal is not None:
            raise HelperOpeningError(refusal)
        return link

    async def _ask_one(
        self, link: HelperLink, question: bytes, timeout_s: float, max_answer_bytes: int
    ) -> bytes:
        is_usable = False
        try:
            answer, refusal = await link.ask(
                question,
                timeout_s=timeout_s,
                max_answer_bytes=max(max_answer_bytes, _MAX_REFUSAL_BYTES),
            )
            is_usable = True
        except TimeoutError:
            raise HelperBrokenError(f"took over {timeout_s:g} s") from None
        finally:
            if is_usable:
                self._idle.append(link)
            else:
                await self._kill(link)
        if refusal is not None:
            raise HelperRefusalError(refusal)
        return answer

    async def _kill(self, link: HelperLink) -> None:
        """Ends a process, to the end even if this is cancelled: else its pipes would stay open."""
        ending = asyncio.create_task(link.kill())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)
