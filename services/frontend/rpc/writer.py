"""Writes to a client with a time limit."""

import asyncio

import grpc
from google.protobuf.message import Message

from services.frontend.errors import SlowReaderError


class Writer:
    """One client's response stream, shared by its requests, which write in turn."""

    def __init__(self, context: grpc.aio.ServicerContext, *, timeout_s: float) -> None:
        """Waits at most `timeout_s` for the client to read."""
        self._context = context
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._is_cut = False

    async def write(self, message: Message) -> None:
        """Writes one message; drops it if the client is gone.

        Raises:
            SlowReaderError: the client does not read; further writes fail too.
        """
        async with self._turn:
            if self._is_cut:
                raise self._slow_reader()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._context.write(message)
            except TimeoutError:
                self._is_cut = True
                raise self._slow_reader() from None
            except grpc.aio.InternalError:
                return  # gRPC will cancel the handler of this call

    def _slow_reader(self) -> SlowReaderError:
        return SlowReaderError(f"output lay unread for {self._timeout_s} s")
