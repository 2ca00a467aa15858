"""Endpoints that read bodies: what they share, whatever their API."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from services.frontend.access.caller import Lease
from services.frontend.engine_client.messages import ABORTED, Usage
from services.frontend.errors import EngineUnavailableError
from services.frontend.http.bodies.call import AnyCall, ReadCall
from services.frontend.http.bodies.reader import BodyReader
from services.frontend.http.wire.body import Bodies, Body
from services.frontend.http.wire.live_requests import LiveRequests
from services.frontend.http.wire.request_id import new_request_id
from services.frontend.http.wire.writer import ResponseWriter
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request import Output
from services.frontend.pipeline.request_log import RequestRecord
from services.frontend.pipeline.samples import Samples
from services.telemetry.trace_context import TRACEPARENT, checked_traceparent
from services.transport.connections import address_of


@dataclass(frozen=True, slots=True)
class Kind(Generic[AnyCall]):
    """The API of an endpoint."""

    method: str
    """Its name in the log."""
    id_prefix: str
    read: ReadCall[AnyCall]
    """Parses its bodies."""
    writer_class: type[ResponseWriter] = ResponseWriter
    """Writes its answers and errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The parts that all endpoints serve with."""

    pipeline: Pipeline
    live: LiveRequests
    bodies: Bodies
    body_reader: BodyReader
    slow_reader_timeout_s: float


class Endpoint(ABC, Generic[AnyCall]):
    """An ASGI application for one endpoint, which notices that its client leaves."""

    def __init__(self, kind: Kind[AnyCall], serving: Serving) -> None:
        self._kind = kind
        self._serving = serving
        self.pipeline = serving.pipeline
        """Runs the requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        request_id = new_request_id(scope, self._kind.id_prefix)
        writer = self._kind.writer_class(
            send,
            timeout_s=self._serving.slow_reader_timeout_s,
            headers={"x-request-id": request_id},
        )
        try:
            # A caller over its limits takes no shared slot, and its body is not read.
            address = address_of((scope["client"] or ("",))[0])
            begin = self.pipeline.begin
            with (
                begin(request_id, address, method=self._kind.method) as lease,
                self._serving.live.place(),
            ):
                request = Request(scope, receive)
                with await self._serving.bodies.read(request, lease.account) as body:
                    lease.num_bytes = body.num_bytes
                    work = self.serve(body, request_id, writer, request, lease)
                    await self._serving.live.run(receive, work)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  the edge: everything becomes a status
            await writer.fail(error)

    async def read(self, body: Body, request_id: str, lease: Lease) -> AnyCall:
        """Parses a body, whose bytes count until then."""
        with body:
            call = await self._serving.body_reader.read(
                self._kind.read,
                body.content,
                request_id,
                lease.account,
                max_prompt_tokens=self.pipeline.models.max_prompt_tokens,
            )
        if call.left_out:
            self.pipeline.requests.note_left_out(call.left_out)
        return call

    @abstractmethod
    async def serve(
        self, body: Body, request_id: str, writer: ResponseWriter, request: Request, lease: Lease
    ) -> None:
        """Serves a request whose body was received."""


class PlainEndpoint(Endpoint[AnyCall]):
    """An endpoint that answers at once, without the model's output."""

    async def serve(
        self, body: Body, request_id: str, writer: ResponseWriter, request: Request, lease: Lease
    ) -> None:
        """Serves a request whose body was received."""
        del request
        call = await self.read(body, request_id, lease)
        with call.naming_fields():
            await self.answer(call, writer, lease)

    @abstractmethod
    async def answer(self, call: AnyCall, writer: ResponseWriter, lease: Lease) -> None:
        """Writes the answer to a parsed request."""


class RecordedEndpoint(Endpoint[AnyCall]):
    """An endpoint that engines compute for, and whose requests are recorded."""

    async def serve(
        self, body: Body, request_id: str, writer: ResponseWriter, request: Request, lease: Lease
    ) -> None:
        """Serves a request whose body was received."""
        traceparent = checked_traceparent(request.headers.get(TRACEPARENT, ""))
        with self.pipeline.requests.watch(
            request_id, method=self._kind.method, traceparent=traceparent
        ) as record:
            call = await self.read(body, request_id, lease)
            with call.naming_fields():
                await self.answer(call, writer, record, lease)

    @abstractmethod
    async def answer(
        self, call: AnyCall, writer: ResponseWriter, record: RequestRecord, lease: Lease
    ) -> None:
        """Runs a parsed request and writes its answer."""


class Response(ABC, Generic[AnyCall]):
    """Writes the output of one request, as events or as one body at its end."""

    def __init__(self, pipeline: Pipeline, call: AnyCall, writer: ResponseWriter) -> None:
        """Raises UnknownModelError or EngineUnavailableError if the model is not served."""
        self._model = pipeline.models.named(call.options.model)
        self._call = call
        self._writer = writer
        self._usage = Usage()

    @abstractmethod
    async def begin(self, generation: Generation | Samples) -> None:
        """Starts the response, if it is a stream of events."""

    async def write(self, output: Output) -> None:
        """Takes new output.

        Raises:
            EngineUnavailableError: the engine ended the request.
        """
        if output.finish_reason == ABORTED:  # no caller aborted it
            raise EngineUnavailableError("the engine ended the request")
        self._usage = output.usage or self._usage
        await self.add(output)

    @abstractmethod
    async def add(self, output: Output) -> None:
        """Writes events, or keeps the output for the end."""

    @abstractmethod
    async def end(self) -> None:
        """Ends the stream of events, or writes the body."""


class GenerationEndpoint(RecordedEndpoint[AnyCall]):
    """An endpoint that runs the model."""

    @abstractmethod
    def respond(self, call: AnyCall, writer: ResponseWriter) -> Response[AnyCall]:
        """Begins a response; raises UnknownModelError or EngineUnavailableError."""

    async def answer(
        self, call: AnyCall, writer: ResponseWriter, record: RequestRecord, lease: Lease
    ) -> None:
        """Runs a parsed request and writes its output."""
        response = self.respond(call, writer)
        await self.pipeline.serve(call.prompt, call.options, response, record=record, lease=lease)
        await response.end()
