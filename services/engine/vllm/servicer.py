"""The supported methods of VllmEngine.

The others (FlushCache, StartProfile, StopProfile) are not registered, so gRPC answers
UNIMPLEMENTED; nor is SubscribeKvEvents without --kv-events, which the gateway understands.
"""

import datetime
import json
from dataclasses import asdict
from functools import partial

import grpc
from google.protobuf import message_factory
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.edge.call import ForeignCall, OpenCalls
from services.engine.edge.kv_events import follow
from services.engine.edge.open_streams import KV_EVENTS, TOKENIZER, OpenStreams, write_in_time
from services.engine.edge.pooled_call import PooledCall
from services.engine.edge.request_reader import RequestReader, check_known
from services.engine.errors import InvalidRequestError, UnsupportedError
from services.engine.grammar.compiler import GrammarCompiler
from services.engine.vllm.embed import prompts_of, response_of
from services.engine.vllm.kv_events import part_to_batch
from services.engine.vllm.message import VllmMessage
from services.engine.vllm.tokenizer_archive import TokenizerArchive
from services.settings.installation import own_version

MAX_ABORTED = 4096
"""Limit of requests in one Abort."""
_SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
_STREAMED = {"Generate", "GetTokenizer", "SubscribeKvEvents"}
_UNARY = {"Embed", "HealthCheck", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads"}
_METHODS = _UNARY | _STREAMED


class VllmServicer:
    """Serves VllmEngine. Methods raise errors; the interceptor maps them.

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
        self._reader = RequestReader(model, max_grammar_bytes=config.grammar.max_grammar_bytes)
        self._tokenizer = TokenizerArchive(model.tokenizer)
        self._calls = OpenCalls(core)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the methods."""
        shown = _METHODS if self._core.block_events else _METHODS - {"SubscribeKvEvents"}
        handlers = {name: self._handler(name) for name in shown}
        generic = grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)
        server.add_generic_rpc_handlers((generic,))

    async def Generate(  # noqa: N802  the protocol's name
        self,
        request: vllm_engine_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Serves one request, with all its outputs."""
        call = ForeignCall(self._core, self._reader, self._config, context, self._grammars)
        with self._calls.live(request.request_id, call):
            await call.run(VllmMessage(request))

    async def Embed(  # noqa: N802  the protocol's name
        self, request: vllm_engine_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.EmbedResponse:
        """Returns the vector of a prompt, or its score."""
        call = PooledCall(self._core, self._reader, context)
        with self._calls.live(request.request_id, call):
            [pooled] = await call.run(partial(prompts_of, request))
        return response_of(pooled)

    async def Abort(  # noqa: N802  the protocol's name
        self, request: vllm_engine_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.AbortResponse:
        """Ends requests of this protocol that came over the same connection.

        It ignores ids of others and of ended requests: a caller can neither discover nor end
        requests of others.
        """
        check_known(request)
        if len(request.request_ids) > MAX_ABORTED:
            raise InvalidRequestError(
                f"request_ids has {len(request.request_ids)} entries; the limit is {MAX_ABORTED}"
            )
        for request_id in request.request_ids:
            call = self._calls.find(request_id)
            if call is not None and call.context.peer() == context.peer():
                call.abort()
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(  # noqa: N802  the protocol's name
        self, request: vllm_engine_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Reports whether requests are accepted now."""
        del context
        check_known(request)
        message = "ready"
        if self._core.drain.has_begun:
            message = "draining"
        elif not self._core.is_ready:
            message = "the worker is starting"
        return vllm_engine_pb2.HealthCheckResponse(healthy=self._core.is_ready, message=message)

    async def GetModelInfo(  # noqa: N802  the protocol's name
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Describes the model, its limits and its default sampling."""
        del context
        check_known(request)
        model = self._model
        # A name would be looked up on Hugging Face first.
        folder = str(self._config.checkpoint.model.absolute())
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=folder,
            tokenizer_path=folder,
            served_model_name=model.name,
            is_generation=model.pooling is None,
            max_context_length=model.max_model_len,
            max_req_input_len=model.max_prompt_len,
            vocab_size=model.vocab_size,
            architectures=[model.architecture],
            eos_token_ids=sorted(model.eos_token_ids),
            default_sampling_params_json=json.dumps(asdict(model.default_sampling)),
        )

    async def GetServerInfo(  # noqa: N802  the protocol's name
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Describes the engine's settings."""
        del context
        check_known(request)
        stats, worker = self._core.stats(), self._core.worker
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=stats.load.num_running + stats.load.num_waiting,
            uptime_seconds=stats.uptime_s,
            server_type="octavo",
            data_parallel_size=1,
            block_size=self._config.cache.block_size,
            model_dtype="" if worker is None else f"torch.{worker.dtype}",
            max_num_seqs=self._config.scheduler.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(  # noqa: N802  the protocol's name
        self, request: vllm_engine_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Reports the engine's load."""
        del context
        check_known(request)
        if request.dp_rank != 0:
            raise UnsupportedError(f"dp_rank is {request.dp_rank}; this engine is rank 0 alone")
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=own_version(),
            dp_rank_count=1,
            loads=[self._load()],
        )

    async def GetTokenizer(  # noqa: N802  the protocol's name
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends the tokenizer's files as one ZIP archive."""
        check_known(request)
        with self._streams.hold(TOKENIZER, context):
            for chunk in self._tokenizer.chunks():
                await write_in_time(context, chunk, self._config.serving.slow_reader_timeout_s)

    async def SubscribeKvEvents(  # noqa: N802  the protocol's name
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends the cached blocks of each rank, then their changes.

        Resuming from a number needs one rank alone, as numbers are a rank's own.
        """
        check_known(request)
        ranks, start = self._core.block_events, request.start_sequence_number
        cursors = {0: start - 1} if start and len(ranks) == 1 else {}
        with self._streams.hold(KV_EVENTS, context):
            await context.send_initial_metadata(())
            async for part in follow(dict(enumerate(ranks)), cursors):
                batch = part_to_batch(part, self._config.cache.block_size)
                await write_in_time(context, batch, self._config.serving.slow_reader_timeout_s)

    def _load(self) -> vllm_engine_pb2.SchedulerLoad:
        stats, block_size = self._core.stats(), self._config.cache.block_size
        load = stats.load
        num_used_blocks = stats.num_blocks - load.num_free_blocks
        prompt_tokens = stats.counters.scheduler.prompt_tokens
        return vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=num_used_blocks * block_size,
            max_total_num_tokens=stats.num_blocks * block_size,
            token_usage=num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0,
            cache_hit_rate=stats.counters.scheduler.cached_tokens / prompt_tokens
            if prompt_tokens
            else 0.0,
            utilization=load.num_running / self._config.scheduler.max_num_seqs,
            max_running_requests=self._config.scheduler.max_num_seqs,
        )

    def _handler(self, name: str) -> grpc.RpcMethodHandler:
        method = _SERVICE.methods_by_name[name]
        make = (
            grpc.unary_stream_rpc_method_handler
            if name in _STREAMED
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            getattr(self, name),
            request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
            response_serializer=message_factory.GetMessageClass(
                method.output_type
            ).SerializeToString,
        )
