"""The engine's figures as Prometheus reads them."""

import asyncio
import re

import grpc
import httpx
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1.engine_pb2 import GenerateRequest, GetStatsRequest
from services.engine.batch import FallbackReason
from services.engine.rpc.metrics import FINISHED, REJECTED
from services.telemetry import metrics
from tests.support.engine_harness import engine_config, model_folder, running_service
from tests.support.otlp_collector import OtlpCollector
from tests.support.processes import free_port
from tests.support.strict_metrics import check_page

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def value(text: str, sample: str) -> float:
    """The value of one sample, given with its labels."""
    [found] = re.findall(rf"^{re.escape(sample)} (\S+)$", text, flags=re.MULTILINE)
    return float(found)


def ask(**changes) -> GenerateRequest:
    wish = {"prompt_token_ids": [1, 2, 3], "sampling": SamplingParams(max_tokens=4, seed=1)}
    return GenerateRequest(**{**wish, **changes})


async def test_images_are_counted_by_how_they_were_encoded(monkeypatch):
    monkeypatch.setattr(metrics, "COLLECT_TIMEOUT_S", 60)
    port = free_port()
    async with (
        running_service(engine_config(metrics_port=port)) as service,
        httpx.AsyncClient(timeout=60) as client,
    ):
        counters = service.core.counters
        counters.scheduler.num_encoded_images = 7
        counters.images_by_run.update({"graph": 5, "eager": 2})
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        stats = await service.stub.GetStats(GetStatsRequest())
    assert dict(stats.images_by_run) == {"graph": 5, "eager": 2}
    for run, count in (("graph", 5), ("compiled", 0), ("eager", 2)):
        sample = f'octavo_encoder_images_total{{model_name="fake",run="{run}"}}'
        assert value(text, sample) == count


async def test_figures_are_those_of_the_stats(monkeypatch):
    monkeypatch.setattr(metrics, "COLLECT_TIMEOUT_S", 60)
    port = free_port()
    async with (
        running_service(engine_config(metrics_port=port)) as service,
        httpx.AsyncClient(timeout=60) as client,
    ):
        async for _ in service.stub.Generate(ask()):
            pass
        with pytest.raises(grpc.aio.AioRpcError):
            await service.stub.Generate(ask(model="another")).read()
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        stats = await service.stub.GetStats(GetStatsRequest())
    model = 'model_name="fake"'
    assert value(text, f"octavo_generation_tokens_total{{{model}}}") == 4 == stats.output_tokens
    assert value(text, f"octavo_prompt_tokens_total{{{model}}}") == 3 == stats.prompt_tokens
    finished = f'octavo_request_success_total{{finished_reason="length",{model}}}'
    assert value(text, finished) == 1 == stats.finished["length"]
    rejected = f'octavo_requests_rejected_total{{code="NOT_FOUND",{model}}}'
    assert value(text, rejected) == 1 == stats.rejected["NOT_FOUND"]
    assert value(text, f"octavo_time_to_first_token_seconds_count{{{model}}}") == 1
    assert sum(stats.time_to_first_token_s.counts) == 1
    assert value(text, f"octavo_inter_token_latency_seconds_count{{{model}}}") == 3
    assert sum(stats.inter_token_latency_s.counts) == 3
    assert sum(stats.e2e_request_latency_s.counts) == sum(stats.request_queue_time_s.counts) == 1
    assert value(text, f"octavo_step_tokens_total{{{model}}}") == 6
    assert value(text, f"octavo_kv_cache_usage_perc{{{model}}}") == 0
    steps = re.findall(r"^octavo_steps_total\{.*\} (\S+)$", text, flags=re.MULTILINE)
    assert sum(map(float, steps)) == stats.num_steps


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
async def test_the_page_is_one_that_strict_tools_take(monkeypatch, accept):
    """With every figure that appears only once something has happened."""
    monkeypatch.setattr(metrics, "COLLECT_TIMEOUT_S", 60)
    port = free_port()
    model = model_folder(name='quoted "name" \\ with a\nline')
    async with (
        running_service(engine_config(metrics_port=port), model=model) as service,
        httpx.AsyncClient(timeout=60) as client,
    ):
        async for _ in service.stub.Generate(ask()):
            pass
        counters = service.core.counters
        counters.finished.update(FINISHED)
        counters.rejected.update(REJECTED)
        counters.graph_dispatch.update(FallbackReason.values())
        counters.drafts.num_verified = counters.num_failed_steps = counters.num_late_builds = 3
        answer = await client.get(f"http://127.0.0.1:{port}/metrics", headers={"accept": accept})
    names = check_page(answer.text, answer.headers["content-type"])
    assert {"octavo_failed_steps", "octavo_steps", "octavo_request_success", "octavo_ready"} < names


async def test_a_call_is_traced_with_its_steps():
    with OtlpCollector() as collector:
        async with running_service(engine_config(otlp_endpoint=collector.endpoint)) as service:
            call = service.stub.Generate(ask(), metadata=(("traceparent", PARENT),))
            async for _ in call:
                pass
        spans = await asyncio.to_thread(collector.wait_for, 4)
    by_name = {span.name: span for span in spans}
    request = by_name["engine request"]
    assert f"00-{request.trace_id}-{request.parent_id}-01" == PARENT
    assert {span.parent_id for span in spans if span is not request} == {request.span_id}
    assert by_name["prefill"].attributes["octavo.num_steps"] == 1
    assert by_name["decode"].attributes["octavo.num_steps"] == 3
    assert by_name["queued"].end_ns == by_name["prefill"].start_ns
    assert request.attributes["octavo.finish_reason"] == "length"
