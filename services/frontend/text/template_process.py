"""Runs a chat template where it can do no harm: in a process that is ended when it takes too long.

A thread would not do. A template can compute 9**9**9, which holds Python's lock and so the whole
frontend, and no thread can be ended.
"""

import asyncio
import contextlib
import datetime
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from services.frontend.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.frontend.text.chat_template import Message
from services.frontend.text.content_marks import MAX_GROWTH
from services.frontend.text.template_source import TemplateRefusedError, TemplateSource
from services.frontend.text.template_worker import LENGTH
from services.frontend.text.tokenizer import TokenizerFilesError

START_TIMEOUT_S = 10.0
"""Longest time until a new process has compiled its template; busy machines are slow at it."""
_WORKER = "services.frontend.text.template_worker"

log = structlog.get_logger()


class _WorkerLostError(Exception):
    """The process took too long or ended; the message says which."""


class TemplateProcess:
    """One model's chat template. It renders one conversation at a time, in about half a ms.

    A conversation that takes longer than the limit costs the process, and the next one starts
    another. Whoever waits that long for a turn is refused.
    """

    def __init__(self, source: TemplateSource, *, timeout_s: float) -> None:
        """Starts nothing yet.

        Args:
            source: the template.
            timeout_s: longest time to compile it, to wait for a turn, and to render.
        """
        self._source = source
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Starts the process and compiles the template.

        Raises:
            TemplateRefusedError: the template is not valid.
            TokenizerFilesError: it takes too long to compile; `render` tries again.
        """
        async with self._turn:
            try:
                await self._spawn()
            except _WorkerLostError as error:
                raise TokenizerFilesError(f"the chat template {error}") from None

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        max_bytes: int,
        marks_content: bool = False,
    ) -> str:
        """Returns the prompt for the answer to a conversation.

        With `marks_content` it has marks in what the caller wrote, for `MarkedText.read`.

        Raises:
            InvalidRequestError: the template refuses the conversation, fails on it, takes too long
                for it, or makes more than `max_bytes` of it.
            OverloadedError: others took too long before.
            EngineUnavailableError: it was closed; another template may have taken its place.
        """
        # A caller that goes away must not leave an answer behind for the next one to read.
        wish = {
            "messages": list(messages),
            "tools": list(tools),
            "max_bytes": max_bytes,
            "marks_content": marks_content,
            # The process has no environment, so it does not know the time zone.
            "now": datetime.datetime.now().isoformat(),
        }
        rendering = asyncio.create_task(self._render(wish, MAX_GROWTH * max_bytes))
        rendering.add_done_callback(_take_error)
        return await asyncio.shield(rendering)

    async def close(self) -> None:
        """Ends the process, after whatever it is at."""
        self._is_closed = True
        async with self._turn:
            await self._kill()

    async def _render(self, wish: Mapping[str, Any], max_bytes: int) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise OverloadedError(
                "the chat template is busy with other conversations", retry_after_ms=1000
            ) from None
        try:
            if self._is_closed:
                raise EngineUnavailableError("the chat template was taken away; try again")
            if self._process is None:
                await self._spawn()
            reply = await self._ask(wish, max_bytes=max_bytes)
        except (_WorkerLostError, TokenizerFilesError) as error:
            log.warning("template_stopped", reason=str(error))
            raise InvalidRequestError(f"the chat template {error}") from None
        finally:
            self._turn.release()
        if "error" in reply:
            raise InvalidRequestError(reply["error"])
        return reply["text"]

    async def _spawn(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _WORKER),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # what it would say there may hold prompts
            # Our environment may hold secrets; only where modules are is told.
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        reply = await self._ask(self._source.opening(), max_bytes=0, timeout_s=START_TIMEOUT_S)
        if "error" in reply:
            await self._kill()
            raise TemplateRefusedError(reply["error"])

    async def _ask(
        self, wish: Mapping[str, Any], *, max_bytes: int, timeout_s: float | None = None
    ) -> dict[str, str]:
        """Sends one message and returns the answer; a process that gives none is ended."""
        process = self._process
        assert process is not None, "spawned before"
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        timeout_s = timeout_s or self._timeout_s
        # The process keeps the time, too, lest it outlive us.
        content = json.dumps({**wish, "timeout_s": timeout_s + 1}).encode()
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(LENGTH.pack(len(content)) + content)
                await process.stdin.drain()
                reply = await _read_reply(process.stdout, max_bytes)
        except BaseException as error:
            await self._kill()
            if isinstance(error, TimeoutError):
                raise _WorkerLostError(f"took over {timeout_s:g} s") from None
            if isinstance(error, EOFError | ConnectionError | ValueError):
                raise _WorkerLostError("broke down") from None
            raise
        return reply

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _read_reply(stdout: asyncio.StreamReader, max_bytes: int) -> dict[str, str]:
    """Reads an answer.

    Raises:
        EOFError: the process ended.
        ValueError: the answer makes no sense, or is too long for one.
    """
    [length] = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
    if length > 12 * max_bytes + 2**16:  # JSON writes a character in 12 at most
        raise ValueError(f"an answer of {length} bytes")
    reply: dict[str, str] = json.loads(await stdout.readexactly(length))
    return reply


def _take_error(rendering: asyncio.Task[str]) -> None:
    """Keeps asyncio from logging an error, with words of the conversation, that nobody awaits."""
    if not rendering.cancelled():
        rendering.exception()
