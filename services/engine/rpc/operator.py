"""The methods of OperatorService: adapters, weights, and the engine's sleep."""
# ruff: noqa: N802  methods have the protocol's names

from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import Message

from protos.engine.v1 import operator_pb2 as pb
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
from services.engine.edge.unary import checked
from services.engine.rpc.weights import update_from_caller, update_from_host, weights_info
from services.transport.message_reader import RefusedMessage

_MODES = {
    pb.SLEEP_MODE_RECOMPUTE: SleepMode.RECOMPUTE,
    pb.SLEEP_MODE_ABORT: SleepMode.ABORT,
}


def _check(servicer: "OperatorServicer", request: Message) -> None:
    check_knows_callers(servicer.config)
    check_known(request)


_checked = checked(_check)


class OperatorServicer(OperatorServiceServicer):
    """The methods of OperatorService; the interceptor maps the errors that they raise."""

    def __init__(self, core: EngineCore, config: ServingConfig) -> None:
        self._core = core
        self._drain_timeout_s = config.drain_timeout_s
        self.config = config

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves the methods on a server."""
        add_OperatorServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]  # generated

    @_checked
    async def LoadAdapter(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Reads an adapter and makes it known."""
        adapters = self._core.adapters
        adapter = await adapters.load(request.name, request.path)
        return pb.LoadAdapterResponse(adapter=self._info(adapter), num_changes=adapters.version)

    @_checked
    async def RemoveAdapter(self, request: pb.RemoveAdapterRequest) -> pb.RemoveAdapterResponse:
        """Forgets an adapter."""
        self._core.adapters.remove(request.name)
        return pb.RemoveAdapterResponse(num_changes=self._core.adapters.version)

    @_checked
    async def ListAdapters(self, request: pb.ListAdaptersRequest) -> pb.ListAdaptersResponse:
        """Returns every adapter."""
        adapters = [self._info(each) for each in self._core.adapters.all]
        return pb.ListAdaptersResponse(adapters=adapters)

    @_checked
    async def Sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        """Puts the engine to sleep."""
        timeout_s = self._drain_timeout_s
        if request.HasField("timeout_ms"):
            timeout_s = request.timeout_ms / 1000
        report = await self._core.sleep.fall_asleep(
            request.level, _MODES.get(request.mode, SleepMode.WAIT), timeout_s
        )
        return pb.SleepResponse(num_bytes=report.num_bytes, took_s=report.took_s)

    @_checked
    async def Wake(self, request: pb.WakeRequest) -> pb.WakeResponse:
        """Wakes the engine."""
        report = await self._core.sleep.wake()
        return pb.WakeResponse(num_bytes=report.num_bytes, took_s=report.took_s)

    @_checked
    async def UpdateWeights(self, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        """Replaces the weights by others on this host."""
        await update_from_host(self._core.weights, request)
        return pb.UpdateWeightsResponse(weights=weights_info(self._core.weights))

    async def UploadWeights(
        self,
        messages: AsyncIterator[pb.UploadWeightsRequest | RefusedMessage],
        context: grpc.aio.ServicerContext,
    ) -> pb.UploadWeightsResponse:
        """Replaces the weights by those of the stream."""
        check_knows_callers(self.config)
        await update_from_caller(self._core.weights, messages)
        return pb.UploadWeightsResponse(weights=weights_info(self._core.weights))

    @_checked
    async def GetWeights(self, request: pb.GetWeightsRequest) -> pb.GetWeightsResponse:
        """Returns which weights serve."""
        return pb.GetWeightsResponse(weights=weights_info(self._core.weights))

    def _info(self, adapter: Adapter) -> pb.AdapterInfo:
        return pb.AdapterInfo(
            name=adapter.name,
            digest=adapter.digest.hex(),
            rank=adapter.rank,
            num_bytes=adapter.num_bytes,
            is_resident=adapter.digest in self._core.resident_adapters,
        )
