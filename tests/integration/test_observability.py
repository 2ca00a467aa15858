"""Metrics, traces and `octavo stats` of both services as processes."""

import asyncio
import json
import re
import urllib.request
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from services.client.client import OctavoClient
from services.client.requests import Message, Options, Sampling
from tests.support.forked_program import run_octavo
from tests.support.otlp_collector import OtlpCollector
from tests.support.processes import ServiceProcess, Stack, free_port, start_engine

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "octavo.json"
QUESTION = [Message(role="user", content="What is 3 + 4?")]


@pytest.fixture(scope="module")
def collector():
    with OtlpCollector() as running:
        yield running


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    """Ports of the metrics by service."""
    return {"engine": free_port(), "frontend": free_port()}


@pytest.fixture(scope="module")
def services(collector, ports):
    module, flags = "tests.support.long_export_timeout", {"otlp_endpoint": collector.endpoint}
    engine = start_engine(module=module, **flags, metrics_port=ports["engine"])
    flags |= {"engine_address": engine.address, "metrics_port": ports["frontend"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms; spans are else kept for seconds
        with Stack(engine, ServiceProcess(module, flags)) as running:
            yield running


@pytest.fixture
def client_tracer(collector):
    """Traces of this process, which is the client."""
    provider = TracerProvider(resource=Resource.create({"service.name": "client"}))
    exporter = OTLPSpanExporter(collector.endpoint, timeout=60)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test")
    provider.shutdown()


async def ask(address: str, *, over_session: bool) -> str:
    """Asks one question and returns the answer."""
    options = Options(sampling=Sampling(max_tokens=8, ignore_eos=True))
    async with OctavoClient(address) as client:
        if not over_session:
            return (await client.chat(QUESTION, options).completion()).text
        async with client.session() as session:
            return (await session.chat(QUESTION, options).completion()).text


@pytest.mark.parametrize("over_session", [False, True], ids=["call", "session"])
def test_one_request_is_one_trace_through_all_processes(
    services, collector, client_tracer, over_session
):
    with client_tracer.start_as_current_span("client") as root:
        trace_id = f"{root.get_span_context().trace_id:032x}"
        asyncio.run(ask(services.frontend.address, over_session=over_session))
    spans = collector.wait_for(10, trace_id=trace_id)
    by_id = {span.span_id: span for span in spans}

    def path(span):
        parent = by_id.get(span.parent_id)
        return (*(path(parent) if parent else ()), f"{span.service}: {span.name}")

    client, frontend, engine = (
        "client: client",
        "octavo-frontend: frontend request",
        "octavo-engine: engine request",
    )
    assert sorted(map(path, spans)) == sorted(
        [
            (client,),
            (client, frontend),
            *(
                (client, frontend, f"octavo-frontend: {phase}")
                for phase in ("tokenize", "submit", "first token", "stream")
            ),
            (client, frontend, engine),
            *(
                (client, frontend, engine, f"octavo-engine: {phase}")
                for phase in ("queued", "prefill", "decode")
            ),
        ]
    )
    decode = next(span for span in spans if span.name == "decode")
    whole = next(span for span in spans if span.name == "engine request")
    assert decode.attributes["octavo.num_steps"] == whole.attributes["octavo.output_tokens"] - 1


def test_every_metric_of_the_dashboard_is_exported(services, ports):
    asyncio.run(ask(services.frontend.address, over_session=False))
    exported = set()
    for port in ports.values():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        exported |= set(re.findall(r"^([a-z0-9_]+)(?:\{.*\})? ", text, flags=re.MULTILINE))
    queries = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', DASHBOARD.read_text())
    named = {name for query in queries for name in re.findall(r"\b(?:octavo|process)_\w+", query)}
    assert len(named) > 25
    assert named - exported == set()


def test_stats_show_the_same_figures(services, ports):
    asyncio.run(ask(services.frontend.address, over_session=False))
    told = run_octavo("stats", "--json", "--engine", services.engine.address)
    stats = json.loads(told.stdout)
    with urllib.request.urlopen(
        f"http://127.0.0.1:{ports['engine']}/metrics", timeout=20
    ) as answer:
        text = answer.read().decode()

    def value(name: str) -> float:
        [found] = re.findall(rf"^{name}\{{.*\}} (\S+)$", text, flags=re.MULTILINE)
        return float(found)

    assert value("octavo_generation_tokens_total") == stats["output_tokens"] > 0
    assert value("octavo_prefix_cache_hits_total") == stats["cached_tokens"]
    first = stats["time_to_first_token_s"]
    assert value("octavo_time_to_first_token_seconds_count") == first["count"] > 0
    assert value("octavo_time_to_first_token_seconds_sum") == pytest.approx(first["sum"])
    assert 0 < first["p50"] <= first["p99"]
