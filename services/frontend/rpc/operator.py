"""The methods of OperatorService: adapters of all engines."""

import grpc

from protos.frontend.v1 import operator_pb2
from protos.frontend.v1.operator_pb2 import FleetAdapter
from protos.frontend.v1.operator_pb2_grpc import (
    OperatorServiceServicer,
    add_OperatorServiceServicer_to_server,
)
from services.frontend.errors import EngineUnavailableError
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.rpc.convert import refuse_unknown_fields


class OperatorServicer(OperatorServiceServicer):
    """Serves OperatorService. Methods raise errors; the interceptor maps them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._gate = pipeline.gate
        self._engines = pipeline.engine

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves the methods on a server."""
        add_OperatorServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]  # generated

    async def LoadAdapter(  # noqa: N802  the protocol's name
        self, request: operator_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> operator_pb2.LoadAdapterResponse:
        """Has all engines load an adapter."""
        del context
        self._gate.check_may_change_adapter(request.name)
        refuse_unknown_fields(request)
        await self._engines.load_adapter(request.name, request.path, model=request.model)
        adapter = next((each for each in self._adapters() if each.name == request.name), None)
        if adapter is None:
            raise EngineUnavailableError("the engines were lost after they loaded the adapter")
        return operator_pb2.LoadAdapterResponse(adapter=adapter)

    async def RemoveAdapter(  # noqa: N802  the protocol's name
        self, request: operator_pb2.RemoveAdapterRequest, context: grpc.aio.ServicerContext
    ) -> operator_pb2.RemoveAdapterResponse:
        """Has all engines forget an adapter."""
        del context
        self._gate.check_may_change_adapter(request.name)
        refuse_unknown_fields(request)
        await self._engines.remove_adapter(request.name)
        return operator_pb2.RemoveAdapterResponse()

    async def ListAdapters(  # noqa: N802  the protocol's name
        self, request: operator_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> operator_pb2.ListAdaptersResponse:
        """Returns the adapters of all engines that the caller may use."""
        del context
        self._gate.check_is_operator()
        refuse_unknown_fields(request)
        return operator_pb2.ListAdaptersResponse(adapters=self._adapters())

    def _adapters(self) -> list[FleetAdapter]:
        """Returns each adapter that the caller may use, by name and content."""
        found: dict[tuple[str, bytes], FleetAdapter] = {}
        for engine in self._engines.usable:
            for known in engine.view.adapters.values():
                if not self._gate.may_use_adapter(known.name):
                    continue
                adapter = found.setdefault(
                    (known.name, known.digest),
                    FleetAdapter(name=known.name, digest=known.digest.hex()),
                )
                adapter.num_engines += 1
                adapter.num_resident += known.is_resident
        return [found[key] for key in sorted(found)]
