"""Calls of the OperatorService of an engine, and of a frontend."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from protos.engine.v1.operator_pb2_grpc import OperatorServiceStub
from protos.frontend.v1 import operator_pb2_grpc as fleet_pb2_grpc
from services.client.channel import Access, Tls, open_channel
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


def call_fleet(address: str, access: Access, call: Callable[..., Awaitable[Any]]) -> Any:
    """Calls a frontend and returns its answer; raises OctavoError for its refusal.

    Args:
        address: of the frontend.
        access: its credentials.
        call: takes the stub and the call's options.
    """

    async def run() -> Any:
        async with open_channel(address, access.tls) as channel:
            stub = fleet_pb2_grpc.OperatorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
            try:
                return await call(stub, metadata=access.metadata)
            except grpc.aio.AioRpcError as error:
                raise error_of_call(error) from None

    return asyncio.run(run())
