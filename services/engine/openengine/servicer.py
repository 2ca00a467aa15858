"""The supported methods of OpenEngine's two services; gRPC answers UNIMPLEMENTED for others."""

import grpc

from protos.openengine.v1 import openengine_pb2
from protos.openengine.v1.openengine_pb2_grpc import (
    ControlServicer,
    InferenceServicer,
    add_ControlServicer_to_server,
    add_InferenceServicer_to_server,
)
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.edge.call import ForeignCall, OpenCalls
from services.engine.edge.open_streams import KV_EVENTS, OpenStreams, write_in_time
from services.engine.edge.operators import check_knows_callers
from services.engine.edge.pooled_call import PooledCall
from services.engine.edge.request_reader import RequestReader
from services.engine.edge.status import count_rejection
from services.engine.errors import (
    EngineError,
    InvalidRequestError,
    NotPermittedError,
    SlowReaderError,
    UnknownModelError,
    UnsupportedError,
)
from services.engine.grammar.compiler import GrammarCompiler
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


class OpenEngineServicer(InferenceServicer, ControlServicer):
    """Serves both services. Methods raise errors; the interceptor maps them.

    Its requests share the core, its checks and its limits with those of frontends.
    """

    def __init__(
        self,
        core: EngineCore,
        model: ModelFolder,
        config: EngineConfig,
        grammars: GrammarCompiler,
        streams: OpenStreams,
    ) -> None:
        self._streams = streams
        self._core = core
        self._model = model
        self._config = config
        self._grammars = grammars
        self._reader = RequestReader(
            model, max_grammar_bytes=config.grammar.max_grammar_bytes, adapters=core.adapters
        )
        self._loras = Loras(core.adapters)
        self._calls = OpenCalls(core)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the methods."""
        add_InferenceServicer_to_server(self, server)  # type: ignore[no-untyped-call]  # generated
        add_ControlServicer_to_server(self, server)  # type: ignore[no-untyped-call]  # generated

    async def Generate(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Serves one request, with all its outputs."""
        try:
            self._check_model(request.model)
        except EngineError as error:
            count_rejection(self._core.counters, error)
            raise
        call = ForeignCall(self._core, self._reader, self._config, context, self._grammars)
        message = OpenEngineMessage(request, context)
        with self._calls.live(request.request_id, call):
            await call.run(message)

    async def Embed(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.EmbedResponse:
        """Returns the vectors of inputs."""
        return await self._pooled(EmbedMessage(request, self._model, context), context)

    async def Score(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.ScoreResponse:
        """Returns how well candidates answer their queries."""
        return await self._pooled(ScoreMessage(request, self._model, context), context)

    async def GetServerInfo(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.ServerInfo:
        """Describes the engine's settings and capacity."""
        del context
        check_served(request)
        return server_info(self._core, self._model, self._config)

    async def GetModelInfo(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.ModelInfo:
        """Describes the model and what requests of it may ask for."""
        del context
        check_served(request)
        self._check_model(request.model)
        return model_info(self._model, self._config)

    async def GetLoad(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.LoadInfo:
        """Reports the engine's load."""
        del context
        check_served(request)
        return load_info(self._core, with_ranks=request.include_per_rank)

    async def Health(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.HealthRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.HealthResponse:
        """Reports whether requests are accepted now."""
        del context
        check_served(request)
        if request.include_inference_probe:
            raise UnsupportedError("include_inference_probe is not served: send a request")
        return health(self._core)

    async def Abort(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.AbortResponse:
        """Ends a request of this protocol that came from the same address.

        The answer for requests of others is the one for ended requests: a caller can neither
        discover nor end them. Dynamo sends it over any of its connections.
        """
        check_served(request)
        if request.WhichOneof("target") != "request_id":
            raise InvalidRequestError("an abort must name a request_id")
        call = self._calls.find(request.request_id)
        if call is None or by_address(call.context) != by_address(context):
            return openengine_pb2.AbortResponse(status=openengine_pb2.ABORT_STATUS_ALREADY_FINISHED)
        call.abort()
        return openengine_pb2.AbortResponse(status=openengine_pb2.ABORT_STATUS_ABORTED)

    async def LoadLora(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.LoadLoraRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.LoadLoraResponse:
        """Loads an adapter from the operator's folder."""
        del context
        check_knows_callers(self._config.serving)
        check_served(request)
        return await self._loras.load(request)

    async def UnloadLora(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.UnloadLoraRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.UnloadLoraResponse:
        """Forgets an adapter."""
        del context
        check_knows_callers(self._config.serving)
        check_served(request)
        return self._loras.unload(request.lora_name)

    async def ListLoras(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.ListLorasRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.ListLorasResponse:
        """Lists all adapters."""
        del context
        check_knows_callers(self._config.serving)
        check_served(request)
        return self._loras.list()

    async def GetKvEventSources(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.GetKvEventSourcesRequest, context: grpc.aio.ServicerContext
    ) -> openengine_pb2.GetKvEventSourcesResponse:
        """Names SubscribeKvEvents for each rank; nothing without --kv-events."""
        del context
        check_served(request)
        ranks = chosen_ranks(self._core.block_events, request.data_parallel_ranks)
        sources = [
            openengine_pb2.KvEventSource(
                transport="grpc", data_parallel_rank=rank, encoding="protobuf"
            )
            for rank in ranks
        ]
        return openengine_pb2.GetKvEventSourcesResponse(sources=sources)

    async def SubscribeKvEvents(  # noqa: N802  the protocol's name
        self, request: openengine_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends changes of the cached blocks, after a snapshot if wanted."""
        check_served(request)
        if not self._core.block_events:
            raise NotPermittedError("cached blocks are not shown; the engine lacks --kv-events")
        records = chosen_ranks(self._core.block_events, request.data_parallel_ranks)
        following = batches(records, request, self._config.cache.block_size)
        timeout_s = self._config.serving.slow_reader_timeout_s
        with self._streams.hold(KV_EVENTS, context):
            await context.send_initial_metadata(())
            try:
                async for batch in following:
                    response = openengine_pb2.SubscribeKvEventsResponse(batch=batch)
                    await write_in_time(context, response, timeout_s)
            except SlowReaderError as error:
                last = openengine_pb2.SubscribeKvEventsResponse(error=failure_to_proto(error))
                await write_in_time(context, last, timeout_s)

    async def _pooled(
        self, message: PooledMessage[MessageT, ResponseT], context: grpc.aio.ServicerContext
    ) -> ResponseT:
        """Serves a call for vectors, or for scores."""
        try:
            self._check_model(message.context.model)
        except EngineError as error:
            count_rejection(self._core.counters, error)
            raise
        call = PooledCall(self._core, self._reader, context)
        with self._calls.live(message.context.request_id, call):
            return message.response(await call.run(message.prompts))

    def _check_model(self, name: str) -> None:
        if name not in ("", self._model.name, model_source(self._config)):
            raise UnknownModelError(f"model {name!r} is not served here; {self._model.name!r} is")
