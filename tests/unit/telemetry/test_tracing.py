"""Spans as a collector gets them, over a socket."""

import sys
import time

import pytest
from pydantic import TypeAdapter, ValidationError

from services.telemetry.spans import Tracing
from services.telemetry.trace_context import checked_traceparent, read_traceparent
from services.telemetry.tracing import OtlpEndpoint
from tests.support.otlp_collector import OtlpCollector
from tests.support.processes import free_port

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_span_belongs_to_its_caller_and_holds_its_phases():
    with OtlpCollector() as collector:
        tracing = Tracing(collector.endpoint, service="here")
        start_s = time.monotonic()
        span = tracing.start("request", traceparent=PARENT, start_s=start_s, method="Chat")
        span.add_phase("queued", start_s, start_s + 1.0)
        span.add_phase("decode", start_s + 1.0, start_s + 3.0, num_steps=7)
        span.end(start_s + 3.0, output_tokens=8)
        tracing.close()
        spans = {each.name: each for each in collector.wait_for(3)}
    request, queued, decode = spans["request"], spans["queued"], spans["decode"]
    assert request.service == "here"
    assert f"00-{request.trace_id}-{request.parent_id}-01" == PARENT
    assert span.traceparent == f"00-{request.trace_id}-{request.span_id}-01"
    assert queued.parent_id == decode.parent_id == request.span_id
    assert queued.end_ns - queued.start_ns == pytest.approx(1e9, rel=1e-6)
    assert queued.end_ns == decode.start_ns
    assert abs(request.start_ns - time.time_ns()) < 60e9
    assert request.attributes == {"octavo.method": "Chat", "octavo.output_tokens": 8}
    assert decode.attributes == {"octavo.num_steps": 7}
    assert not request.is_error


def test_a_failure_is_named():
    with OtlpCollector() as collector:
        tracing = Tracing(collector.endpoint, service="here")
        tracing.start("request", traceparent="", start_s=0.0).end(1.0, error="QueueFullError")
        tracing.close()
        [span] = collector.wait_for(1)
    assert span.is_error
    assert span.parent_id == ""


def test_what_the_caller_does_not_sample_is_not_sent():
    with OtlpCollector() as collector:
        tracing = Tracing(collector.endpoint, service="here")
        unsampled = tracing.start("unsampled", traceparent=PARENT[:-1] + "0", start_s=0.0)
        assert unsampled.traceparent.endswith("-00")
        unsampled.add_phase("queued", 0.0, 1.0)
        unsampled.end(1.0)
        tracing.start("sampled", traceparent="", start_s=0.0).end(1.0)
        tracing.close()
        assert [span.name for span in collector.wait_for(1)] == ["sampled"]


def test_a_collector_that_is_away_holds_no_request_up():
    tracing = Tracing(f"http://127.0.0.1:{free_port()}", service="here")
    tracing.start("request", traceparent="", start_s=0.0).end(1.0)
    tracing.close()


@pytest.mark.parametrize(
    "value", ["", "x", PARENT + "0", PARENT.upper(), PARENT.replace("-", "_"), PARENT + "\n"]
)
def test_a_malformed_parent_counts_as_none(value):
    assert checked_traceparent(value) == ""


def test_the_parent_is_found_among_metadata():
    assert read_traceparent((("user-agent", "x"), ("traceparent", PARENT))) == PARENT
    assert read_traceparent((("traceparent", "nonsense"),)) == ""
    assert read_traceparent(None) == ""


@pytest.mark.parametrize("endpoint", ["collector:4317", "ftp://a:1", "http://a", "http://a:1/x"])
def test_an_endpoint_is_a_url_with_a_port(endpoint):
    with pytest.raises(ValidationError, match="pattern"):
        TypeAdapter(OtlpEndpoint).validate_python(endpoint)


@pytest.mark.parametrize("endpoint", ["http://[::1:4317", "http://a:99999", "http://a:b:1"])
def test_an_endpoint_that_nothing_could_send_to_is_refused(endpoint):
    with pytest.raises(ValidationError):
        TypeAdapter(OtlpEndpoint).validate_python(endpoint)


def test_without_the_extra_the_endpoint_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)
    with pytest.raises(ValidationError, match=r"the extra `tracing` brings"):
        TypeAdapter(OtlpEndpoint).validate_python("http://a:4317")
