"""Loads and removes adapters at engines."""

import grpc

from protos.common.v1.failure_pb2 import Failure
from protos.engine.v1.engine_pb2 import KnownAdapter
from protos.engine.v1.operator_pb2 import LoadAdapterRequest, RemoveAdapterRequest
from protos.engine.v1.operator_pb2_grpc import OperatorServiceStub
from services.frontend.engine_client.messages import error_of
from services.frontend.errors import InvalidRequestError, NotPermittedError

LOAD_TIMEOUT_S = 600.0
"""An adapter may have to come from the hub first."""
REMOVE_TIMEOUT_S = 10.0
_UNSERVED = "the engine was started without room for adapters: --max-loras"


class AdapterOrders:
    """Orders to one engine about its adapters."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = OperatorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code

    async def load(self, name: str, path: str) -> KnownAdapter:
        """Has the engine load an adapter.

        Raises:
            FrontendError, EngineFaultError: it does not, with its reason.
        """
        request = LoadAdapterRequest(name=name, path=path)
        try:
            answer = await self._stub.LoadAdapter(request, timeout=LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise order_error(error, unserved=_UNSERVED) from None
        return KnownAdapter(name=name, digest=bytes.fromhex(answer.adapter.digest))

    async def remove(self, name: str) -> None:
        """Has the engine remove an adapter.

        Raises:
            FrontendError, EngineFaultError: it does not, with its reason.
        """
        request = RemoveAdapterRequest(name=name)
        try:
            await self._stub.RemoveAdapter(request, timeout=REMOVE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise order_error(error, unserved=_UNSERVED) from None


def order_error(error: grpc.aio.AioRpcError, *, unserved: str) -> Exception:
    """Returns the error of an operator's call that an engine refused.

    Args:
        error: of the call.
        unserved: the message if the engine has no such call.
    """
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return NotPermittedError(message)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequestError(unserved)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return InvalidRequestError(message)
    return error_of(Failure(code=code.value[0], message=message))
