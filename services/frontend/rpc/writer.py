"""Writes to a client that may not be reading."""

import asyncio

import grpc
from google.protobuf.message import Message

from services.frontend.errors import SlowReaderError


class Writer:
    """One client's stream of responses, shared by everything that answers on it.

    Writers take turns in the order in which they asked. gRPC itself buffers some megabytes; once
    they are full a write waits for the client, and only for so long.
    """

    def __init__(self, context: grpc.aio.ServicerContext, *, timeout_s: float) -> None:
        """Writes to `context`, waiting at most `timeout_s` for the client to read."""
        self._context = context
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._is_cut = False

    async def write(self, message: Message) -> None:
        """Writes one message; one to a client that is gone goes nowhere.

        Raises:
            SlowReaderError: the client does not read; nothing can be written any more.
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
                return  # gRPC cancels whoever serves the call, but has not got round to it

    def _slow_reader(self) -> SlowReaderError:
        return SlowReaderError(f"output lay unread for {self._timeout_s} s")
