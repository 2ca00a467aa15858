"""The supported methods of OpenEngine's two services; gRPC answers UNIMPLEMENTED for others."""
# ruff: noqa: N802  methods have the protocol's names

import grpc
from google.protobuf.message import Message

from protos.openengine.v1 import openengine_pb2 as pb
from protos.openengine.v1.openengine_pb2_grpc import (
    ControlServicer,
    InferenceServicer,
    add_ControlServicer_to_server,
    add_InferenceServicer_to_server,
)
from services.engine.edge.call import GenerateCall, OpenCalls
from services.engine.edge.edge import Edge
from services.engine.edge.open_streams import KV_EVENTS
from services.engine.edge.operators import check_knows_callers
from services.engine.edge.pooled_call import PooledCall
from services.engine.edge.status import count_rejection
from services.engine.edge.unary import checked
from services.engine.errors import (
    EngineError,
    InvalidRequestError,
    NotPermittedError,
    SlowReaderError,
    UnknownModelError,
    UnsupportedError,
)
from services.engine.openengine.facts import (
    health,
    load_info,
    model_info,
    model_source,
    server_info,
)
from services.engine.openengine.failure import failure_to_proto
from services.engine.openengine.kv_events import batches, chosen_ranks
from services.engine.openengine.loras import Loras
from services.engine.openengine.message import OpenEngineMessage
from services.engine.openengine.pooled import (
    EmbedMessage,
    MessageT,
    PooledMessage,
    ResponseT,
    ScoreMessage,
)
from services.engine.openengine.requests import check_served
from services.transport.callers import by_address


def _check_operator(servicer: "OpenEngineServicer", request: Message) -> None:
    check_knows_callers(servicer.edge.config.serving)
    check_served(request)


_checked = checked(lambda _, request: check_served(request))
_checked_of_operators = checked(_check_operator)


class OpenEngineServicer(InferenceServicer, ControlServicer):
    """Serves both services. Methods raise errors; the interceptor maps them.

    Its requests share the core, its checks and its limits with those of frontends.
    """

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self._loras = Loras(edge.core.adapters)
        self._calls = OpenCalls(edge.core)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the methods."""
        add_InferenceServicer_to_server(self, server)  # type: ignore[no-untyped-call]  # generated
        add_ControlServicer_to_server(self, server)  # type: ignore[no-untyped-call]  # generated

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Serves one request, with all its outputs."""
        try:
            self._check_model(request.model)
        except EngineError as error:
            count_rejection(self.edge.core.counters, error)
            raise
        call = GenerateCall(self.edge, context)
        message = OpenEngineMessage(request, context)
        with self._calls.live(request.request_id, call):
            await call.run(message)

    async def Embed(
        self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> pb.EmbedResponse:
        """Returns the vectors of inputs."""
        return await self._pooled(EmbedMessage(request, self.edge.model, context), context)

    async def Score(
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> pb.ScoreResponse:
        """Returns how well candidates answer their queries."""
        return await self._pooled(ScoreMessage(request, self.edge.model, context), context)

    @_checked
    async def GetServerInfo(self, request: pb.GetServerInfoRequest) -> pb.ServerInfo:
        """Describes the engine's settings and capacity."""
        return server_info(self.edge.core, self.edge.model, self.edge.config)

    @_checked
    async def GetModelInfo(self, request: pb.GetModelInfoRequest) -> pb.ModelInfo:
        """Describes the model and what requests of it may ask for."""
        self._check_model(request.model)
        return model_info(self.edge.model, self.edge.config)

    @_checked
    async def GetLoad(self, request: pb.GetLoadRequest) -> pb.LoadInfo:
        """Reports the engine's load."""
        return load_info(self.edge.core, with_ranks=request.include_per_rank)

    @_checked
    async def Health(self, request: pb.HealthRequest) -> pb.HealthResponse:
        """Reports whether requests are accepted now."""
        if request.include_inference_probe:
            raise UnsupportedError("include_inference_probe is not served: send a request")
        return health(self.edge.core)

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """Ends a request of this protocol that came from the same address.

        The answer for requests of others is the one for ended requests: a caller can neither
        discover nor end them. Dynamo sends it over any of its connections.
        """
        check_served(request)
        if request.WhichOneof("target") != "request_id":
            raise InvalidRequestError("an abort must name a request_id")
        call = self._calls.find(request.request_id)
        if call is None or by_address(call.context) != by_address(context):
            return pb.AbortResponse(status=pb.ABORT_STATUS_ALREADY_FINISHED)
        call.abort()
        return pb.AbortResponse(status=pb.ABORT_STATUS_ABORTED)

    @_checked_of_operators
    async def LoadLora(self, request: pb.LoadLoraRequest) -> pb.LoadLoraResponse:
        """Loads an adapter from the operator's folder."""
        return await self._loras.load(request)

    @_checked_of_operators
    async def UnloadLora(self, request: pb.UnloadLoraRequest) -> pb.UnloadLoraResponse:
        """Forgets an adapter."""
        return self._loras.unload(request.lora_name)

    @_checked_of_operators
    async def ListLoras(self, request: pb.ListLorasRequest) -> pb.ListLorasResponse:
        """Lists all adapters."""
        return self._loras.list()

    @_checked
    async def GetKvEventSources(
        self, request: pb.GetKvEventSourcesRequest
    ) -> pb.GetKvEventSourcesResponse:
        """Names SubscribeKvEvents for each rank; nothing without --kv-events."""
        ranks = chosen_ranks(self.edge.core.block_events, request.data_parallel_ranks)
        sources = [
            pb.KvEventSource(transport="grpc", data_parallel_rank=rank, encoding="protobuf")
            for rank in ranks
        ]
        return pb.GetKvEventSourcesResponse(sources=sources)

    async def SubscribeKvEvents(
        self, request: pb.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends changes of the cached blocks, after a snapshot if wanted."""
        check_served(request)
        if not self.edge.core.block_events:
            raise NotPermittedError("cached blocks are not shown; the engine lacks --kv-events")
        records = chosen_ranks(self.edge.core.block_events, request.data_parallel_ranks)
        following = batches(records, request, self.edge.config.cache.block_size)
        with self.edge.streams.hold(KV_EVENTS, context):
            await context.send_initial_metadata(())
            try:
                async for batch in following:
                    response = pb.SubscribeKvEventsResponse(batch=batch)
                    await self.edge.write(context, response)
            except SlowReaderError as error:
                last = pb.SubscribeKvEventsResponse(error=failure_to_proto(error))
                await self.edge.write(context, last)

    async def _pooled(
        self, message: PooledMessage[MessageT, ResponseT], context: grpc.aio.ServicerContext
    ) -> ResponseT:
        """Serves a call for vectors, or for scores."""
        try:
            self._check_model(message.context.model)
        except EngineError as error:
            count_rejection(self.edge.core.counters, error)
            raise
        call = PooledCall(self.edge, context)
        with self._calls.live(message.context.request_id, call):
            return message.response(await call.run(message.prompts))

    def _check_model(self, name: str) -> None:
        if name not in ("", self.edge.model.name, model_source(self.edge.config)):
            raise UnknownModelError(
                f"model {name!r} is not served here; {self.edge.model.name!r} is"
            )
