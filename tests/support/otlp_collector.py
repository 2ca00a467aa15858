"""A collector of traces on a loopback port: OTLP over gRPC, from OpenTelemetry's own stubs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self
from unittest import mock

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from services.telemetry import spans
from tests.support.processes import free_port


@dataclass(frozen=True)
class SeenSpan:
    """A span that came in."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, object]


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that services send it; services in this process wait for it longer."""

    def __init__(self) -> None:
        self._spans: list[SeenSpan] = []
        self._arrived = threading.Condition()
        self._timeouts = mock.patch.multiple(spans, EXPORT_TIMEOUT_S=60, CLOSE_TIMEOUT_S=60)

    def __enter__(self) -> Self:
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{free_port()}")
        self.endpoint = f"http://127.0.0.1:{port}"
        self._server.start()
        self._timeouts.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timeouts.stop()
        self._server.stop(None)

    def Export(  # noqa: N802  the protocol's name
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Takes spans."""
        with self._arrived:
            for of_resource in request.resource_spans:
                service = _plain(of_resource.resource.attributes)["service.name"]
                for of_scope in of_resource.scope_spans:
                    self._spans += [_seen(str(service), span) for span in of_scope.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, num_spans: int, *, trace_id: str = "") -> list[SeenSpan]:
        """Returns the spans of a trace, or all spans, once `num_spans` have come."""
        with self._arrived:
            assert self._arrived.wait_for(
                lambda: len(self._of(trace_id)) >= num_spans, timeout=120
            ), f"only these came: {[(s.service, s.name) for s in self._spans]}"
            return self._of(trace_id)

    def _of(self, trace_id: str) -> list[SeenSpan]:
        return [span for span in self._spans if trace_id in ("", span.trace_id)]


def _seen(service: str, span: trace_pb2.Span) -> SeenSpan:
    return SeenSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        attributes=_plain(span.attributes),
    )


def _plain(attributes) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
