"""One helper process, and the pipes to it."""

import asyncio
import contextlib
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping

import structlog

from services.processes.child import child_command
from services.processes.helper_frames import ANSWER_HEADER, QUESTION_HEADER, AnswerKind
from services.processes.message_memory import MessageMemory

REAP_TIMEOUT_S = 5.0
"""Time that a killed process has to end. One that a broken device holds up is left alone then."""
_LOST_EXIT_S = 1.0
"""Time that a process which closed its pipes has to end by itself, so that its status says why."""
_INLINE_BYTES = 2**22
"""Longer answers are copied in a thread."""
_OUTSIDE_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Sent by operators, supervisors and a kernel that is short of memory; a crash sends others."""

log = structlog.get_logger()


class LinkLostError(Exception):
    """The process ended or answered nonsense; the message says which."""

    def __init__(self, message: str, *, is_killed_from_outside: bool = False) -> None:
        super().__init__(message)
        self.is_killed_from_outside = is_killed_from_outside


class HelperLink:
    """A process that answers one question at a time. After an error it takes only `kill`."""

    def __init__(self, process: Process, memory: MessageMemory | None) -> None:
        self._process = process
        self._memory = memory

    @classmethod
    async def start(
        cls, module: str, environment: Mapping[str, str], *, memory_bytes: int = 0
    ) -> "HelperLink":
        """Starts a process.

        Args:
            module: its program.
            environment: its variables.
            memory_bytes: longest message that goes through memory; 0 for none.

        Raises:
            OSError: the system gives no process or no pipes now.
            RuntimeError: the same, as uvloop says it at times.
        """
        memory = MessageMemory.create(memory_bytes) if memory_bytes else None
        fds = () if memory is None else (memory.fd,)
        try:
            process = await asyncio.create_subprocess_exec(
                *child_command(module, [str(fd) for fd in fds]),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,  # what it would write there may hold prompts
                env=environment,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C in the terminal reaches the service alone
            )
        except BaseException:
            if memory is not None:
                memory.close()
            raise
        return cls(process, memory)

    @property
    def is_alive(self) -> bool:
        """Whether the process has not been seen to end."""
        return self._process.returncode is None

    async def ask(
        self, question: bytes, *, timeout_s: float, max_answer_bytes: int
    ) -> tuple[bytes, str | None]:
        """Returns the answer to a question and None, or nothing and why there is no answer.

        Raises:
            TimeoutError: there was no answer in time.
            LinkLostError: the process is gone, or sent something else or more than it may.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "a pipe"
        assert stdout is not None, "a pipe"
        try:
            async with asyncio.timeout(timeout_s):
                stdin.write(self._framed(question, timeout_s))
                await stdin.drain()
                length, kind = ANSWER_HEADER.unpack(await stdout.readexactly(ANSWER_HEADER.size))
                if length > max_answer_bytes:
                    raise LinkLostError(f"it answered with {length} bytes")
                if kind == AnswerKind.IN_MEMORY:
                    return await self._read_memory(length), None
                content = await stdout.readexactly(length)
        except TimeoutError:
            raise
        # A closed pipe is any of these: uvloop raises RuntimeError.
        except (EOFError, OSError, RuntimeError):
            raise await self._loss() from None
        if kind == AnswerKind.ANSWER:
            return content, None
        return b"", content.decode(errors="replace")

    async def kill(self) -> None:
        """Ends the process, and gives its memory back. May be called again."""
        if self._memory is not None:
            self._memory.close()  # an error's frames may keep this until garbage is collected
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "a pipe"
        assert stdout is not None, "a pipe"
        stdin.close()
        try:
            async with asyncio.timeout(REAP_TIMEOUT_S):
                # The pipe is closed once it has been read to its end.
                with contextlib.suppress(OSError, RuntimeError):
                    while await stdout.read(2**16):
                        pass
                await self._process.wait()
        except TimeoutError:
            log.warning("helper_process_unkillable", pid=self._process.pid)

    def _framed(self, question: bytes, timeout_s: float) -> bytes:
        """Returns what the pipe takes of a question, whose content may go through memory."""
        is_in_memory = self._memory is not None and self._memory.takes(len(question))
        if self._memory is not None and is_in_memory:
            self._memory.write([question])
        header = QUESTION_HEADER.pack(len(question), timeout_s, is_in_memory)
        return header if is_in_memory else header + question

    async def _read_memory(self, length: int) -> bytes:
        """Returns an answer that is in memory.

        Raises:
            LinkLostError: the memory has none of this length.
        """
        if self._memory is None or not self._memory.takes(length):
            raise LinkLostError(f"it has no answer of {length} bytes in memory")
        if length <= _INLINE_BYTES:
            return self._memory.read(length)
        return await asyncio.to_thread(self._memory.read, length)

    async def _loss(self) -> LinkLostError:
        """Says how the process ended that closed its pipes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOST_EXIT_S):
                await self._process.wait()
        status = self._process.returncode
        if status is None:
            return LinkLostError("it closed its pipes")
        if status >= 0:
            return LinkLostError(f"it exited with {status}")
        return LinkLostError(
            f"it was ended by signal {-status}",
            is_killed_from_outside=-status in _OUTSIDE_SIGNALS,
        )
