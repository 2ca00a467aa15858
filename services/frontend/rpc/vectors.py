"""The methods of FrontendService that answer with vectors and scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from protos.frontend.v1 import frontend_pb2
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceServicer
from services.frontend.access.caller import Lease
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.vectors import VectorOptions
from services.frontend.rpc.convert import refuse_unknown_fields
from services.frontend.rpc.convert_vectors import inputs_of, pairs_of, vector_options_of
from services.telemetry.trace_context import checked_traceparent, read_traceparent
from services.transport.callers import address_of


class VectorServicer(FrontendServiceServicer):
    """Serves Embed and Score; the other methods are FrontendServicer's."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def Embed(  # noqa: N802  the protocol's name
        self, request: frontend_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> frontend_pb2.EmbedResponse:
        """Returns the vectors of inputs."""
        with self._vectors(request, context) as (options, call):
            inputs = inputs_of(request, max_tokens=self._pipeline.models.max_prompt_tokens)
            vectors = await self._pipeline.vectors.embed(
                inputs, options, **call, timeout_s=context.time_remaining()
            )
        return frontend_pb2.EmbedResponse(
            vectors=vectors.matrix.astype("<f4").tobytes(),
            size=vectors.matrix.shape[1],
            usage=vectors.usage,
        )

    async def Score(  # noqa: N802  the protocol's name
        self, request: frontend_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> frontend_pb2.ScoreResponse:
        """Returns the scores of pairs."""
        with self._vectors(request, context) as (options, call):
            vectors = await self._pipeline.vectors.score(
                pairs_of(request), options, **call, timeout_s=context.time_remaining()
            )
        return frontend_pb2.ScoreResponse(scores=vectors.matrix[:, 0].tolist(), usage=vectors.usage)

    def begin(
        self,
        request: Message,
        request_id: str,
        context: grpc.aio.ServicerContext,
        *,
        method: str,
        is_free: bool = False,
    ) -> Lease:
        """Takes the caller's slot for a request; see `Pipeline.begin`."""
        address = address_of(context.peer())
        lease = self._pipeline.begin(request_id, address, method=method, is_free=is_free)
        lease.num_bytes = request.ByteSize()
        return lease

    @contextmanager
    def _vectors(
        self,
        request: frontend_pb2.EmbedRequest | frontend_pb2.ScoreRequest,
        context: grpc.aio.ServicerContext,
    ) -> Iterator[tuple[VectorOptions, dict[str, Any]]]:
        """Takes the slot and the record of a request for vectors, and yields its options."""
        method = request.DESCRIPTOR.name.removesuffix("Request")
        request_id = request.options.request_id
        with self.begin(request, request_id, context, method=method) as lease:
            refuse_unknown_fields(request)
            options = vector_options_of(request)
            traceparent = checked_traceparent(request.options.traceparent)
            with self._pipeline.requests.watch(
                options.request_id,
                method=method,
                traceparent=traceparent or read_traceparent(context.invocation_metadata()),
            ) as record:
                yield options, {"record": record, "lease": lease}
