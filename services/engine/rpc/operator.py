"""The methods of OperatorService: adapters, weights, and the engine's sleep."""

from collections.abc import AsyncIterator

import grpc

from protos.engine.v1 import operator_pb2
from protos.engine.v1.operator_pb2_grpc import (
    OperatorServiceServicer,
    add_OperatorServiceServicer_to_server,
)
from services.engine.adapter import Adapter
from services.engine.config.serving import ServingConfig
from services.engine.core.engine_core import EngineCore
from services.engine.core.sleep import SleepMode
from services.engine.edge.operators import check_knows_callers
from services.engine.edge.request_reader import check_known
from services.engine.rpc.weights import update_from_caller, update_from_host, weights_info
from services.transport.message_reader import RefusedMessage

_MODES = {
    operator_pb2.SLEEP_MODE_RECOMPUTE: SleepMode.RECOMPUTE,
    operator_pb2.SLEEP_MODE_ABORT: SleepMode.ABORT,
}


class OperatorServicer(OperatorServiceServicer):
    """The methods of OperatorService; the interceptor maps the errors that they raise."""

    def __init__(self, core: EngineCore, config: ServingConfig) -> None:
        self._core = core
        self._drain_timeout_s = config.drain_timeout_s
        self._config = config

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves the methods on a server."""
        add_OperatorServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]  # generated

    async def LoadAdapter(  # noqa: N802  the protocol's name
        self, request: operator_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> operator_pb2.LoadAdapterResponse:
        """Reads an adapter and makes it known."""
        del context
        self._check()
        check_known(request)
        adapters = self._core.adapters
        adapter = await adapters.load(request.name, request.path)
        return operator_pb2.LoadAdapterResponse(
            adapter=self._info(adapter), num_changes=adapters.version
        )

    async def RemoveAdapter(  # noqa: N802  the protocol's name
        self, request: operator_pb2.RemoveAdapterRequest, context: grpc.aio.ServicerContext
    ) -> operator_pb2.RemoveAdapterResponse:
        """Forgets an adapter."""
        del context
        self._check()
        check_known(request)
        self._core.adapters.remove(request.name)
        return operator_pb2.RemoveAdapterResponse(num_changes=self._core.adapters.version)

    async def ListAdapters(  # noqa: N802  the protocol's name
        self, request: operator_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> operator_pb2.ListAdaptersResponse:
        """Returns every adapter."""
        del context
        self._check()
        check_known(request)
        adapters = [self._info(each) for each in self._core.adapters.all]
        return operator_pb2.ListAdaptersResponse(adapters=adapters)

    async def Sleep(  # noqa: N802  the protocol's name
        self, request: operator_pb2.SleepRequest, context: grpc.aio.ServicerContext
    ) -> operator_pb2.SleepResponse:
        """Puts the engine to sleep."""
        del context
        self._check()
        check_known(request)
        timeout_s = self._drain_timeout_s
        if request.HasField("timeout_ms"):
            timeout_s = request.timeout_ms / 1000
        report = await self._core.sleep.fall_asleep(
            request.level, _MODES.get(request.mode, SleepMode.WAIT), timeout_s
        )
        return operator_pb2.SleepResponse(num_bytes=report.num_bytes, took_s=report.took_s)

    async def Wake(  # noqa: N802  the protocol's name
        self, request: operator_pb2.WakeRequest, context: grpc.aio.ServicerContext
    ) -> operator_pb2.WakeResponse:
        """Wakes the engine."""
        del context
        self._check()
        check_known(request)
        report = await self._core.sleep.wake()
        return operator_pb2.WakeResponse(num_bytes=report.num_bytes, took_s=report.took_s)

    async def UpdateWeights(  # noqa: N802  the protocol's name
        self, request: operator_pb2.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> operator_pb2.UpdateWeightsResponse:
        """Replaces the weights by others on this host."""
        del context
        self._check()
        await update_from_host(self._core.weights, request)
        return operator_pb2.UpdateWeightsResponse(weights=weights_info(self._core.weights))

    async def UploadWeights(  # noqa: N802  the protocol's name
        self,
        messages: AsyncIterator[operator_pb2.UploadWeightsRequest | RefusedMessage],
        context: grpc.aio.ServicerContext,
    ) -> operator_pb2.UploadWeightsResponse:
        """Replaces the weights by those of the stream."""
        del context
        self._check()
        await update_from_caller(self._core.weights, messages)
        return operator_pb2.UploadWeightsResponse(weights=weights_info(self._core.weights))

    async def GetWeights(  # noqa: N802  the protocol's name
        self, request: operator_pb2.GetWeightsRequest, context: grpc.aio.ServicerContext
    ) -> operator_pb2.GetWeightsResponse:
        """Returns which weights serve."""
        del context
        self._check()
        check_known(request)
        return operator_pb2.GetWeightsResponse(weights=weights_info(self._core.weights))

    def _check(self) -> None:
        """Refuses all callers if any host may call."""
        check_knows_callers(self._config)

    def _info(self, adapter: Adapter) -> operator_pb2.AdapterInfo:
        return operator_pb2.AdapterInfo(
            name=adapter.name,
            digest=adapter.digest.hex(),
            rank=adapter.rank,
            num_bytes=adapter.num_bytes,
            is_resident=adapter.digest in self._core.resident_adapters,
        )
