"""Loads and removes adapters at engines."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from protos.common.v1.failure_pb2 import Failure
from protos.engine.v1.engine_pb2 import KnownAdapter
from protos.engine.v1.operator_pb2 import LoadAdapterRequest, RemoveAdapterRequest
from protos.engine.v1.operator_pb2_grpc import OperatorServiceStub
from services.frontend.engine_client.engine_view import AdapterChange
from services.frontend.engine_client.messages import error_of
from services.frontend.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    NotPermittedError,
)

LOAD_TIMEOUT_S = 600.0
"""An adapter may have to come from the hub first."""
REMOVE_TIMEOUT_S = 10.0
_CLOSED = ("Cancelling all calls", "Socket closed")
"""gRPC's words for a server that goes away during a call."""
_UNSERVED = "the engine was started without room for adapters: --max-loras"


class AdapterOrders:
    """Orders to one engine about its adapters."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = OperatorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code

    async def load(self, name: str, path: str) -> AdapterChange:
        """Has the engine load an adapter.

        Raises:
            FrontendError, EngineFaultError: it does not, with its reason.
        """
        request = LoadAdapterRequest(name=name, path=path)
        answer = await answer_of(
            lambda: self._stub.LoadAdapter(request, timeout=LOAD_TIMEOUT_S), unserved=_UNSERVED
        )
        adapter = KnownAdapter(name=name, digest=bytes.fromhex(answer.adapter.digest))
        return AdapterChange(name, adapter, answer.num_changes)

    async def remove(self, name: str) -> AdapterChange:
        """Has the engine remove an adapter.

        Raises:
            FrontendError, EngineFaultError: it does not, with its reason.
        """
        request = RemoveAdapterRequest(name=name)
        answer = await answer_of(
            lambda: self._stub.RemoveAdapter(request, timeout=REMOVE_TIMEOUT_S), unserved=_UNSERVED
        )
        return AdapterChange(name, None, answer.num_changes)


async def answer_of(call: Callable[[], Awaitable[Any]], *, unserved: str) -> Any:
    """Returns the answer to an operator's call to an engine.

    Args:
        call: begins it.
        unserved: the message if the engine has no such call.

    Raises:
        FrontendError, EngineFaultError: the engine refused it, or was lost.
    """
    lost = "the engine was lost before it answered"
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        raise _order_error(error, unserved) from None
    except grpc.aio.UsageError:
        raise EngineUnavailableError(lost) from None
    except asyncio.CancelledError:
        # A session that ends closes its channel, which cancels calls, not their callers.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EngineUnavailableError(lost) from None


def _order_error(error: grpc.aio.AioRpcError, unserved: str) -> Exception:
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and message in _CLOSED:
        return EngineUnavailableError("the engine ended before it answered; its log says why")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return NotPermittedError(message)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequestError(unserved)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return InvalidRequestError(message)
    return error_of(Failure(code=code.value[0], message=message))
