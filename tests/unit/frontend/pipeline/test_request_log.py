"""Counts and traces of the frontend's requests, over every way in."""

import asyncio
import re
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
from structlog.testing import capture_logs

from protos.common.v1.failure_pb2 import Failure
from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import frontend_stack
from tests.support.otlp_collector import OtlpCollector
from tests.support.waiting import until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-11111111111111111111111111111111-2222222222222222-01"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def watched_stack(engine: FakeEngine | None = None, **config: object):
    async with (
        engine or FakeEngine() as running,
        frontend_stack(running, http_port=0, **config) as stack,
        stack.http_client() as client,
    ):
        yield stack, client


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    """Samples by name with labels, without the prefix."""
    text = (await client.get("/metrics")).text
    pairs = re.findall(r"^octavo_frontend_(\S+) (\S+)$", text, flags=re.MULTILINE)
    return {name: float(value) for name, value in pairs}


def generate(**options) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="one two", options=pb.GenerationOptions(**options))


async def test_requests_of_every_way_in_are_counted():
    async with watched_stack() as (stack, client):
        await client.post("/v1/chat/completions", json=CHAT)
        stack.engine.hold_at = 1  # else all tokens may come at once, with no time between them
        call = stack.stub.Generate(generate())
        await call.read()
        stack.engine.hold_at = None
        while await call.read() is not grpc.aio.EOF:
            pass
        call = stack.stub.Session()
        await call.write(pb.SessionRequest(handle=1, generate=generate()))
        await call.done_writing()
        async for _ in call:
            pass
        now = await figures(client)
    assert now['request_success_total{finished_reason="stop"}'] == 3
    assert now["requests_live"] == 0
    assert now["engine_ready"] == 1
    for name in ("tokenize", "submit", "time_to_first_token", "e2e_request_latency"):
        assert now[f"{name}_seconds_count"] == 3
    num_tokens = now["generation_tokens_total"]
    assert 0 < now["inter_token_latency_seconds_count"] <= num_tokens - 3
    assert now["prompt_tokens_total"] > now["cached_tokens_total"] > 0


async def test_requests_that_fail_are_counted_by_error():
    rejection = Failure(code=8, message="full")
    async with watched_stack(FakeEngine(rejection=rejection)) as (stack, client):
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json=CHAT | {"temperature": 9})
        for options in ({"model": "another"}, {}):
            with pytest.raises(grpc.aio.AioRpcError):
                await stack.stub.Generate(generate(**options)).read()
        now = await figures(client)
    assert now['requests_failed_total{error="OverloadedError"}'] == 2
    assert now['requests_failed_total{error="InvalidRequestError"}'] == 1
    assert now['requests_failed_total{error="UnknownModelError"}'] == 1
    assert now['request_success_total{finished_reason="stop"}'] == 0


async def test_a_refusal_is_logged_with_the_wrong_field():
    async with watched_stack() as (_, client):
        with capture_logs() as events:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"top_p": 7})
    assert answer.status_code == 400
    [refusal] = [event for event in events if event["event"] == "request_failed"]
    assert (refusal["error"], refusal["field"]) == ("InvalidRequestError", "top_p")


async def test_a_client_that_goes_away_is_counted_as_cancelled():
    async with watched_stack(FakeEngine(script=says("one two " * 100))) as (stack, client):
        stack.engine.pause()
        call = stack.stub.Generate(generate())
        await call.initial_metadata()
        assert (await figures(client))["requests_live"] == 1
        call.cancel()
        counts = stack.server.requests.counts
        await until(lambda: counts.failed["cancelled"] == 1)
        assert (await figures(client))["requests_live"] == 0


async def test_the_parent_is_taken_from_where_the_caller_puts_it_and_passed_on():
    metadata = (("traceparent", PARENT),)
    async with watched_stack() as (stack, client):
        await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": PARENT})
        async for _ in stack.stub.Generate(generate(), metadata=metadata):
            pass
        call = stack.stub.Session(metadata=metadata)
        await call.write(pb.SessionRequest(handle=1, generate=generate()))
        await call.write(pb.SessionRequest(handle=2, generate=generate(traceparent=OTHER)))
        await call.done_writing()
        async for _ in call:
            pass
        passed_on = [submit.traceparent for submit in stack.engine.submits]
    assert passed_on == [PARENT, PARENT, PARENT, OTHER]


async def test_a_request_has_a_span_that_the_engine_receives():
    with OtlpCollector() as collector:
        async with watched_stack(otlp_endpoint=collector.endpoint) as (stack, _):
            sampling = SamplingParams(max_tokens=2)
            request = generate(sampling=sampling, request_id="r")
            async for _ in stack.stub.Generate(request, metadata=(("traceparent", PARENT),)):
                pass
            [submit] = stack.engine.submits
        spans = await asyncio.to_thread(collector.wait_for, 5)
    by_name = {span.name: span for span in spans}
    span = by_name["frontend request"]
    assert f"00-{span.trace_id}-{span.parent_id}-01" == PARENT
    assert submit.traceparent == f"00-{span.trace_id}-{span.span_id}-01"
    phases = [by_name[name] for name in ("tokenize", "submit", "first token", "stream")]
    assert {phase.parent_id for phase in phases} == {span.span_id}
    starts = [phase.start_ns for phase in phases]
    assert starts == sorted(starts)
    assert starts[0] == span.start_ns
    assert span.attributes["octavo.method"] == "Generate"
    assert span.attributes["octavo.request_id"] == "r"
    assert span.attributes["octavo.output_tokens"] == 2


async def test_a_refused_request_has_a_span_that_says_why():
    with OtlpCollector() as collector:
        async with watched_stack(otlp_endpoint=collector.endpoint) as (stack, _):
            with pytest.raises(grpc.aio.AioRpcError):
                await stack.stub.Generate(generate(model="another")).read()
        spans = await asyncio.to_thread(collector.wait_for, 2)
    by_name = {span.name: span for span in spans}
    assert by_name["frontend request"].is_error
    assert set(by_name) == {"frontend request", "tokenize"}
