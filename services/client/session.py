"""Many requests over one stream."""

import asyncio
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Self

import grpc

from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.client.errors import InternalError, OctavoError, error_of, error_of_call
from services.client.requests import (
    Message,
    Options,
    Reply,
    Tool,
    chat_request,
    generate_request,
)
from services.client.responses import Chunk, chunk_of
from services.client.stream import Stream
from services.client.tracing import traceparent

Parts = Iterable[str] | AsyncIterable[str]


class Session:
    """Carries many requests over one stream; each has its own `Stream` and is cancelled alone.

    An async context manager: leaving it ends the requests that still run. When the connection is
    lost, every live stream raises, and so does every later request.
    """

    def __init__(
        self,
        stub: frontend_pb2_grpc.FrontendServiceStub,
        *,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        self._handles = itertools.count(1)
        self._outgoing: asyncio.Queue[frontend_pb2.SessionRequest | None] = asyncio.Queue()
        self._live: dict[int, asyncio.Queue[Chunk | OctavoError]] = {}
        self._ended: OctavoError | None = None

    async def __aenter__(self) -> Self:
        self._call = self._stub.Session(self._requests(), metadata=self._metadata)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._outgoing.put_nowait(None)
        self._call.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader

    def generate(self, prompt: str | Sequence[int], options: Options | None = None) -> Stream:
        """Continues a prompt, given as text or as token ids."""
        handle = self._new_handle()
        request = generate_request(prompt, options or Options())
        request.options.traceparent = traceparent()
        return self._submit(frontend_pb2.SessionRequest(handle=handle, generate=request))

    def chat(
        self,
        messages: Sequence[Message],
        options: Options | None = None,
        *,
        tools: Sequence[Tool] = (),
        reply: Reply | None = None,
    ) -> Stream:
        """Answers a conversation."""
        handle = self._new_handle()
        request = chat_request(messages, options or Options(), tools, reply)
        request.options.traceparent = traceparent()
        return self._submit(frontend_pb2.SessionRequest(handle=handle, chat=request))

    async def generate_parts(self, parts: Parts, options: Options | None = None) -> Stream:
        """Continues a prompt that is sent part by part, while its author still writes it."""
        handle = self._new_handle()
        first = frontend_pb2.PromptPart(options=(options or Options()).to_proto())
        first.options.traceparent = traceparent()
        stream = self._submit(frontend_pb2.SessionRequest(handle=handle, prompt_part=first))
        async for text in _iterate(parts):
            self._send_part(handle, frontend_pb2.PromptPart(text=text))
        self._send_part(handle, frontend_pb2.PromptPart(last=True))
        return stream

    def _new_handle(self) -> int:
        if self._ended is not None:
            raise self._ended
        return next(self._handles)

    def _submit(self, request: frontend_pb2.SessionRequest) -> Stream:
        handle = request.handle
        self._live[handle] = asyncio.Queue()
        self._outgoing.put_nowait(request)
        return Stream(_chunks(self._live[handle]), lambda: self._cancel(handle))

    def _send_part(self, handle: int, part: frontend_pb2.PromptPart) -> None:
        if handle in self._live:
            self._outgoing.put_nowait(frontend_pb2.SessionRequest(handle=handle, prompt_part=part))

    def _cancel(self, handle: int) -> None:
        if handle in self._live:
            self._outgoing.put_nowait(
                frontend_pb2.SessionRequest(handle=handle, cancel=frontend_pb2.Cancel())
            )

    async def _requests(self) -> AsyncIterator[frontend_pb2.SessionRequest]:
        while (request := await self._outgoing.get()) is not None:
            yield request

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._deliver(response)
            self._end(InternalError("the server ended the session", code="UNKNOWN"))
        except grpc.aio.AioRpcError as error:
            self._end(error_of_call(error))
        except asyncio.CancelledError:
            self._end(error_of(grpc.StatusCode.CANCELLED.value[0], "the session was left"))
            raise

    def _deliver(self, response: frontend_pb2.SessionResponse) -> None:
        arrivals = self._live.get(response.handle)
        if arrivals is None:
            return
        if response.HasField("failure"):
            failure = response.failure
            after = failure.retry_after_ms if failure.HasField("retry_after_ms") else None
            arrivals.put_nowait(error_of(failure.code, failure.message, after))
            del self._live[response.handle]
            return
        chunk = chunk_of(response.output)
        arrivals.put_nowait(chunk)
        if chunk.usage is not None:
            del self._live[response.handle]

    def _end(self, error: OctavoError) -> None:
        self._ended = error
        for arrivals in self._live.values():
            arrivals.put_nowait(error)
        self._live.clear()


async def _chunks(arrivals: asyncio.Queue[Chunk | OctavoError]) -> AsyncIterator[Chunk]:
    is_last = False
    while not is_last:
        item = await arrivals.get()
        if isinstance(item, OctavoError):
            raise item
        is_last = item.usage is not None
        yield item


async def _iterate(parts: Parts) -> AsyncIterator[str]:
    if isinstance(parts, AsyncIterable):
        async for part in parts:
            yield part
    else:
        for part in parts:
            yield part
