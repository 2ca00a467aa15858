"""Writes an HTTP response with a time limit."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from starlette.types import Message, Send

from services.frontend.errors import SlowReaderError
from services.frontend.http.wire.status import HttpError, http_error_of

Body = Mapping[str, Any]


class ResponseWriter:
    """One response, as a whole or as server-sent events; the server buffers tens of kilobytes."""

    last_event: ClassVar[bytes] = b"data: [DONE]\n\n"
    """Ends a stream."""
    names_events: ClassVar[bool] = False
    """Whether each event has its type as its name."""

    def __init__(self, send: Send, *, timeout_s: float, headers: Mapping[str, str]) -> None:
        """Waits at most `timeout_s` per write; `headers` go with every response."""
        self._send = send
        self._timeout_s = timeout_s
        self.headers = dict(headers)
        """Headers of every response."""
        self._is_started = False
        self._is_cut = False

    async def write(self, body: Body) -> None:
        """Writes the whole response."""
        await self._write_whole(_encode(body))

    async def write_json(self, text: str) -> None:
        """Writes the whole response, which is encoded already."""
        await self._write_whole(text.encode())

    async def start_events(self) -> None:
        """Starts a stream of events."""
        await self._start(
            200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        )

    async def write_event(self, body: Body) -> None:
        """Writes one event.

        Raises:
            SlowReaderError: the client does not read; further writes fail too.
        """
        await self.write_events([body])

    async def write_events(self, bodies: Iterable[Body]) -> None:
        """Writes events that are ready together at once; see `write_event`."""
        content = b"".join(map(self.event, bodies))
        if content:
            await self._write(content, more=True)

    async def end_events(self) -> None:
        """Ends a stream of events successfully."""
        await self._write(self.last_event, more=False)

    async def fail(self, error: BaseException) -> None:
        """Answers with an error: by status, or in a stream by a last event."""
        told = http_error_of(error)
        if self._is_cut:
            return
        body = self.error_body(told)
        if self._is_started:
            await self._write(self.event(body), more=False)
            return
        await self._start(told.status, {"content-type": "application/json", **told.headers})
        await self._write(_encode(body), more=False)

    def event(self, body: Body) -> bytes:
        """Encodes one event."""
        name = b"event: " + str(body["type"]).encode() + b"\n" if self.names_events else b""
        return name + b"data: " + _encode(body) + b"\n\n"

    def error_body(self, told: HttpError) -> Body:
        """Returns the body of an error."""
        return told.body

    async def _write_whole(self, content: bytes) -> None:
        await self._start(200, {"content-type": "application/json"})
        await self._write(content, more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._is_started = True
        pairs = (self.headers | dict(headers)).items()
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, content: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": content, "more_body": more}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            self._is_cut = True
            raise SlowReaderError(f"output lay unread for {self._timeout_s} s") from None


def _encode(body: Body) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
