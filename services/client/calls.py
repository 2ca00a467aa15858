"""Calls of the services, each over a connection of its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from services.client.channel import PLAIN, Access, Tls, open_channel
from services.client.client import OctavoClient
from services.client.errors import error_of_call

_Stub = TypeVar("_Stub")
_Answer = TypeVar("_Answer")


@asynccontextmanager
async def connected(
    stub: Callable[[grpc.aio.Channel], _Stub], address: str, tls: Tls = PLAIN
) -> AsyncIterator[_Stub]:
    """Yields a stub of generated code; raises OctavoError for the status of a call that failed."""
    async with open_channel(address, tls) as channel:
        try:
            yield stub(channel)
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from None


def ask(
    stub: Callable[[grpc.aio.Channel], _Stub],
    address: str,
    tls: Tls,
    call: Callable[[_Stub], Awaitable[Any]],
) -> Any:
    """Returns the answer to a call; raises OctavoError for a refusal."""

    async def run() -> Any:
        async with connected(stub, address, tls) as service:
            return await call(service)

    return asyncio.run(run())


def ask_frontend(
    address: str, access: Access, call: Callable[[OctavoClient], Awaitable[_Answer]]
) -> _Answer:
    """Returns what a client of a frontend does; raises OctavoError for a refusal."""

    async def run() -> _Answer:
        async with OctavoClient(address, access=access) as client:
            return await call(client)

    return asyncio.run(run())
