"""Spans of requests, for a collector that speaks OTLP over gRPC.

Imported only where an endpoint is configured: the OpenTelemetry SDK is an optional extra. Its own
environment variables hold for what is not ours to decide: sampling (OTEL_TRACES_SAMPLER), headers
and certificates of the collector, attributes of the resource.
"""

import threading
import time

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.telemetry.trace_context import TRACEPARENT

EXPORT_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 3.0
"""Time that the last spans have to reach their collector."""

Attribute = str | int | float | bool


class Tracing:
    """Makes spans of one service and sends them in batches, from a thread of its own."""

    def __init__(self, endpoint: str, *, service: str) -> None:
        """Connects when the first spans are sent; a collector that is away costs a warning.

        Args:
            endpoint: the collector.
            service: names the service in its traces.
        """
        self._exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: service}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self, name: str, *, traceparent: str, start_s: float, **attributes: Attribute
    ) -> "RequestSpan":
        """Starts the span of a request that this service was asked for.

        Args:
            name: of the span.
            traceparent: the caller's span; empty starts a trace.
            start_s: when it began, of `time.monotonic()`.
            attributes: facts of the request.
        """
        clock_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract({TRACEPARENT: traceparent} if traceparent else {}),
            kind=SpanKind.SERVER,
            start_time=clock_ns + int(start_s * 1e9),
            attributes=_named(attributes),
        )
        return RequestSpan(self._tracer, span, clock_ns)

    def close(self) -> None:
        """Sends what is left, for a few seconds at most; blocks."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if closing.is_alive():
            self._exporter.shutdown()


class RequestSpan:
    """One request's time in one service, with its phases as spans inside it."""

    def __init__(self, tracer: Tracer, span: Span, clock_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._clock_ns = clock_ns

    @property
    def traceparent(self) -> str:
        """Metadata that makes the next service's span a child of this one."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def add_phase(self, name: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        """Adds a span of what happened between two times of `time.monotonic()`."""
        if not self._span.is_recording():
            return
        phase = self._tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            start_time=self._unix_ns(start_s),
            attributes=_named(attributes),
        )
        phase.end(self._unix_ns(end_s))

    def end(self, end_s: float, *, error: str | None = None, **attributes: Attribute) -> None:
        """Ends the span.

        Args:
            end_s: when, of `time.monotonic()`.
            error: name of the error that the request ended with.
            attributes: facts of the request.
        """
        self._span.set_attributes(_named(attributes))
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._unix_ns(end_s))

    def _unix_ns(self, at_s: float) -> int:
        return self._clock_ns + int(at_s * 1e9)


def _named(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    """Returns attributes under a prefix of ours, which avoids clashes."""
    return {f"octavo.{name}": value for name, value in attributes.items()}
