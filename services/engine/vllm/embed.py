"""One Embed call, with its one request."""

import asyncio
import uuid

import grpc
import numpy as np
from smg_grpc_proto.generated.vllm_engine_pb2 import EmbedRequest, EmbedResponse

from protos.engine.v1.engine_pb2 import Submit
from services.engine.batch import read_float32
from services.engine.core.engine_core import EngineCore
from services.engine.edge.request_reader import RequestReader, check_known
from services.engine.edge.status import count_rejection
from services.engine.errors import EngineError, EngineUnavailableError
from services.engine.request import OutputSink, Request, RequestOutput
from services.telemetry.trace_context import read_traceparent


class EmbedCall(OutputSink):
    """Serves one call and is the sink of its request."""

    def __init__(
        self, core: EngineCore, reader: RequestReader, context: grpc.aio.ServicerContext
    ) -> None:
        self._core = core
        self._reader = reader
        self.context = context
        self._request: Request | None = None
        self._output: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()

    def put(self, output: RequestOutput) -> None:
        """Takes the request's only output."""
        if not self._output.done():
            self._output.set_result(output)

    def flush(self) -> None:
        """Does nothing: the output is all."""

    def abort(self) -> None:
        """Ends the request early."""
        if self._request is not None:
            self._core.abort(self._request)

    async def run(self, message: EmbedRequest) -> EmbedResponse:
        """Returns the vector of a prompt.

        Raises:
            EngineError: the request was refused, failed, or was aborted.
        """
        try:
            self._core.check_ready()
            self._request = self._read(message)
            self._core.submit(self._request)
        except EngineError as error:
            count_rejection(self._core.counters, error)
            raise
        try:
            output = await self._output
        finally:
            self.abort()
        if output.error is not None:
            raise output.error
        if not output.vector:
            raise EngineUnavailableError("the caller gave the request up")
        vector = read_float32(output.vector)
        return EmbedResponse(
            embedding=vector,
            prompt_tokens=len(message.tokenized.input_ids),
            embedding_dim=len(vector),
        )

    def _read(self, message: EmbedRequest) -> Request:
        """Reads the message as a session's request."""
        check_known(message)
        submit = Submit(
            request_id=message.request_id or uuid.uuid4().hex,
            prompt_token_ids=np.array(message.tokenized.input_ids, "<u4").tobytes(),
            traceparent=read_traceparent(self.context.invocation_metadata()),
            pool=True,
        )
        if (timeout_s := self.context.time_remaining()) is not None:
            submit.timeout_ms = max(0, int(timeout_s * 1000))
        return self._reader.from_submit(submit, self, self._reader.session_images())
