"""Endpoints that read bodies: what they share, whatever their API."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from services.frontend.access.caller import Lease
from services.frontend.http.bodies.call import Call, ReadCall
from services.frontend.http.bodies.reader import BodyReader
from services.frontend.http.wire.body import Bodies, Body
from services.frontend.http.wire.live_requests import LiveRequests
from services.frontend.http.wire.request_id import new_request_id
from services.frontend.http.wire.writer import ResponseWriter
from services.frontend.pipeline.pipeline import Outlet, Pipeline
from services.telemetry.trace_context import TRACEPARENT, checked_traceparent
from services.transport.connections import address_of


@dataclass(frozen=True, slots=True)
class Kind:
    """The API of an endpoint."""

    method: str
    """Its name in the log."""
    id_prefix: str
    read: ReadCall
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


class Endpoint(ABC):
    """An ASGI application for one endpoint, which notices that its client leaves."""

    def __init__(self, kind: Kind, serving: Serving) -> None:
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

    async def read(self, body: Body, request_id: str, lease: Lease) -> Call:
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


class Response(Outlet, Protocol):
    """Writes the output of one request."""

    async def end(self) -> None:
        """Writes what follows the last output."""


class GenerationEndpoint(Endpoint):
    """An endpoint that runs the model."""

    @abstractmethod
    def respond(self, call: Call, writer: ResponseWriter) -> Response:
        """Begins a response; raises UnknownModelError or EngineUnavailableError."""

    async def serve(
        self, body: Body, request_id: str, writer: ResponseWriter, request: Request, lease: Lease
    ) -> None:
        """Serves a request whose body was received."""
        traceparent = checked_traceparent(request.headers.get(TRACEPARENT, ""))
        with self.pipeline.requests.watch(
            request_id, method=self._kind.method, traceparent=traceparent
        ) as record:
            call = await self.read(body, request_id, lease)
            response = self.respond(call, writer)
            with call.naming_fields():
                await self.pipeline.serve(
                    call.prompt, call.options, response, record=record, lease=lease
                )
            await response.end()
