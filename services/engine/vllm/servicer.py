"""The supported methods of VllmEngine.

The others (FlushCache, StartProfile, StopProfile) are not registered, so gRPC answers
UNIMPLEMENTED; nor is SubscribeKvEvents without --kv-events, which the gateway understands.
"""
# ruff: noqa: N802  methods have the protocol's names

import datetime
import json
from dataclasses import asdict
from functools import partial

import grpc
from google.protobuf import message_factory
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from services.engine.edge.call import GenerateCall, OpenCalls
from services.engine.edge.edge import Edge
from services.engine.edge.kv_events import follow
from services.engine.edge.open_streams import KV_EVENTS, TOKENIZER
from services.engine.edge.pooled_call import PooledCall
from services.engine.edge.request_reader import check_known
from services.engine.edge.unary import checked
from services.engine.errors import InvalidRequestError, UnsupportedError
from services.engine.vllm.embed import prompts_of, response_of
from services.engine.vllm.kv_events import part_to_batch
from services.engine.vllm.message import VllmMessage
from services.engine.vllm.tokenizer_archive import TokenizerArchive
from services.settings.installation import own_version

MAX_ABORTED = 4096
"""Limit of requests in one Abort."""
_SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]
_STREAMED = {"Generate", "GetTokenizer", "SubscribeKvEvents"}
_UNARY = {"Embed", "HealthCheck", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads"}
_METHODS = _UNARY | _STREAMED
_checked = checked(lambda _, request: check_known(request))


class VllmServicer:
    """Serves VllmEngine. Methods raise errors; the interceptor maps them.

    Its requests share the core, its checks and its limits with those of frontends.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._tokenizer = TokenizerArchive(edge.model.tokenizer)
        self._calls = OpenCalls(edge.core)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the methods."""
        shown = _METHODS if self._edge.core.block_events else _METHODS - {"SubscribeKvEvents"}
        handlers = {name: self._handler(name) for name in shown}
        generic = grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)
        server.add_generic_rpc_handlers((generic,))

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Serves one request, with all its outputs."""
        call = GenerateCall(self._edge, context)
        with self._calls.live(request.request_id, call):
            await call.run(VllmMessage(request))

    async def Embed(
        self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> pb.EmbedResponse:
        """Returns the vector of a prompt, or its score."""
        call = PooledCall(self._edge, context)
        with self._calls.live(request.request_id, call):
            [pooled] = await call.run(partial(prompts_of, request))
        return response_of(pooled)

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
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
        return pb.AbortResponse()

    @_checked
    async def HealthCheck(self, request: pb.HealthCheckRequest) -> pb.HealthCheckResponse:
        """Reports whether requests are accepted now."""
        message = "ready"
        if self._edge.core.drain.has_begun:
            message = "draining"
        elif not self._edge.core.is_ready:
            message = "the worker is starting"
        return pb.HealthCheckResponse(healthy=self._edge.core.is_ready, message=message)

    @_checked
    async def GetModelInfo(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        """Describes the model, its limits and its default sampling."""
        model = self._edge.model
        # A name would be looked up on Hugging Face first.
        folder = str(self._edge.config.checkpoint.model.absolute())
        return pb.GetModelInfoResponse(
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

    @_checked
    async def GetServerInfo(self, request: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        """Describes the engine's settings."""
        stats, worker = self._edge.core.stats(), self._edge.core.worker
        return pb.GetServerInfoResponse(
            active_requests=stats.load.num_running + stats.load.num_waiting,
            uptime_seconds=stats.uptime_s,
            server_type="octavo",
            data_parallel_size=1,
            block_size=self._edge.config.cache.block_size,
            model_dtype="" if worker is None else f"torch.{worker.dtype}",
            max_num_seqs=self._edge.config.scheduler.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    @_checked
    async def GetLoads(self, request: pb.GetLoadsRequest) -> pb.GetLoadsResponse:
        """Reports the engine's load."""
        if request.dp_rank != 0:
            raise UnsupportedError(f"dp_rank is {request.dp_rank}; this engine is rank 0 alone")
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=own_version(),
            dp_rank_count=1,
            loads=[self._load()],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends the tokenizer's files as one ZIP archive."""
        check_known(request)
        with self._edge.streams.hold(TOKENIZER, context):
            for chunk in self._tokenizer.chunks():
                await self._edge.write(context, chunk)

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends the cached blocks of each rank, then their changes.

        Resuming from a number needs one rank alone, as numbers are a rank's own.
        """
        check_known(request)
        ranks, start = self._edge.core.block_events, request.start_sequence_number
        cursors = {0: start - 1} if start and len(ranks) == 1 else {}
        with self._edge.streams.hold(KV_EVENTS, context):
            await context.send_initial_metadata(())
            async for part in follow(dict(enumerate(ranks)), cursors):
                batch = part_to_batch(part, self._edge.config.cache.block_size)
                await self._edge.write(context, batch)

    def _load(self) -> pb.SchedulerLoad:
        stats, block_size = self._edge.core.stats(), self._edge.config.cache.block_size
        load = stats.load
        num_used_blocks = stats.num_blocks - load.num_free_blocks
        prompt_tokens = stats.counters.scheduler.prompt_tokens
        return pb.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=num_used_blocks * block_size,
            max_total_num_tokens=stats.num_blocks * block_size,
            token_usage=num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0,
            cache_hit_rate=stats.counters.scheduler.cached_tokens / prompt_tokens
            if prompt_tokens
            else 0.0,
            utilization=load.num_running / self._edge.config.scheduler.max_num_seqs,
            max_running_requests=self._edge.config.scheduler.max_num_seqs,
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
