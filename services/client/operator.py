"""Calls of an engine's OperatorService."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from protos.engine.v1.operator_pb2_grpc import OperatorServiceStub
from services.client.channel import Tls, open_channel
from services.client.errors import error_of_call


def call_operator(
    address: str, tls: Tls, call: Callable[[OperatorServiceStub], Awaitable[Any]]
) -> Any:
    """Calls an engine and returns its answer; raises OctavoError for its refusal."""

    async def run() -> Any:
        async with open_channel(address, tls) as channel:
            stub = OperatorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
            try:
                return await call(stub)
            except grpc.aio.AioRpcError as error:
                raise error_of_call(error) from None

    return asyncio.run(run())
