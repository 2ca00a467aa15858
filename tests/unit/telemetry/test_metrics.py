"""The endpoint for Prometheus: its figures, from which thread, and when it fails."""

import asyncio
import contextlib
import socket
import ssl
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from services.telemetry import metrics as metrics_module
from services.telemetry import metrics_server
from services.telemetry.histogram import Histogram
from services.telemetry.metrics import Families, Metrics
from services.telemetry.metrics_server import MAX_CONNECTIONS_PER_ADDRESS
from services.transport.counts import LocalCounts
from services.transport.refused_calls import RefusedCalls
from services.transport.tls import ServerTls
from tests.support.certificates import LOOPBACK, Authority


@pytest.fixture(autouse=True)
def _long_timeouts(monkeypatch):
    monkeypatch.setattr(metrics_module, "COLLECT_TIMEOUT_S", 60)
    monkeypatch.setattr(metrics_server, "CALLER_TIMEOUT_S", 60)


def families_of(text: str) -> dict[str, dict[tuple, float]]:
    """Samples by name and labels."""
    found: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


async def scrape(metrics: Metrics) -> httpx.Response:
    """Reads the port as Prometheus does."""
    port = metrics.serve("127.0.0.1", 0, None)
    try:
        async with httpx.AsyncClient(timeout=20) as client:
            return await client.get(f"http://127.0.0.1:{port}/metrics")
    finally:
        await asyncio.to_thread(metrics.close)


async def test_every_kind_of_family_is_exported():
    families = Families("octavo", model_name="m")
    histogram = Histogram([0.1, 1.0])
    for value in (0.05, 0.5, 5.0):
        histogram.observe(value)

    def source():
        yield families.gauge("running", 3, "Now")
        yield families.counter("tokens", 7, "So far")
        yield families.counters("steps", "dispatch", {"graph": 2, "oversize": 1}, "By reason")
        yield families.histogram("latency_seconds", histogram, "Times")

    found = families_of((await scrape(Metrics(source))).text)
    model = ("model_name", "m")
    assert found["octavo_running"] == {(model,): 3}
    assert found["octavo_tokens_total"] == {(model,): 7}
    assert found["octavo_steps_total"][("dispatch", "graph"), model] == 2
    buckets = {dict(key)["le"]: n for key, n in found["octavo_latency_seconds_bucket"].items()}
    assert buckets == {"0.1": 1, "1.0": 2, "+Inf": 3}
    assert found["octavo_latency_seconds_count"] == {(model,): 3}
    assert found["octavo_latency_seconds_sum"] == {(model,): pytest.approx(5.55)}
    assert found["process_resident_memory_bytes"]


async def test_figures_are_read_in_the_event_loop():
    seen = []

    def source():
        seen.append(threading.current_thread())
        return ()

    await scrape(Metrics(source))
    assert seen == [threading.main_thread()]


async def test_a_service_that_is_held_up_fails_the_scrape(monkeypatch):
    monkeypatch.setattr(metrics_module, "COLLECT_TIMEOUT_S", 0.05)
    metrics = Metrics(lambda: ())
    port = metrics.serve("127.0.0.1", 0, None)
    answers = []
    scraping = threading.Thread(
        target=lambda: answers.append(httpx.get(f"http://127.0.0.1:{port}", timeout=20))
    )
    scraping.start()
    scraping.join()  # the event loop does nothing meanwhile
    await asyncio.to_thread(metrics.close)
    assert answers[0].status_code == 500


async def test_a_taken_port_is_an_error():
    first, second = Metrics(lambda: ()), Metrics(lambda: ())
    port = first.serve("127.0.0.1", 0, None)
    with pytest.raises(OSError, match="in use"):
        second.serve("127.0.0.1", port, None)
    await asyncio.to_thread(first.close)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
async def secure_port(authority):
    """Where figures are served with TLS, to callers with a certificate of the authority alone."""
    pair = authority.issue("server", LOOPBACK)
    metrics = Metrics(lambda: ())
    yield metrics.serve(
        LOOPBACK, 0, ServerTls(cert=pair.cert, key=pair.key, client_ca=authority.cert)
    )
    await asyncio.to_thread(metrics.close)


async def get_securely(port, authority, pair=None):
    context = ssl.create_default_context(cafile=authority.cert)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    async with httpx.AsyncClient(verify=context, timeout=20) as client:
        return await client.get(f"https://{LOOPBACK}:{port}/metrics")


async def test_with_tls_only_a_caller_with_a_certificate_is_answered(authority, secure_port, capfd):
    answer = await get_securely(secure_port, authority, authority.issue("reader", "prometheus"))
    assert "process_resident_memory_bytes" in answer.text
    with pytest.raises((httpx.HTTPError, ssl.SSLError)):
        await get_securely(secure_port, authority)
    async with httpx.AsyncClient(timeout=20) as client:
        with pytest.raises((httpx.HTTPError, ssl.SSLError)):
            await client.get(f"http://{LOOPBACK}:{secure_port}/metrics")
    assert "Traceback" not in capfd.readouterr().err


async def test_a_caller_that_never_shakes_hands_keeps_no_other_waiting(authority, secure_port):
    pair = authority.issue("reader", "prometheus")
    with socket.create_connection((LOOPBACK, secure_port)):
        assert (await get_securely(secure_port, authority, pair)).status_code == 200


async def test_new_certificates_count_for_the_next_scrape(tmp_path, authority, secure_port):
    other = Authority(tmp_path, "other")
    pair = other.issue("reader", "prometheus")
    with pytest.raises((httpx.HTTPError, ssl.SSLError)):
        await get_securely(secure_port, other, pair)
    other.issue("server", LOOPBACK)
    other.cert.replace(authority.cert)
    assert (await get_securely(secure_port, authority, pair)).status_code == 200


async def raw_answer(port: int, sent: bytes) -> bytes:
    """Returns everything that comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(sent)
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", b"405"),
        (b"hello\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"405"),
        (b"GET / HTTP/1.1\r\nhost: evil.example:9000\r\n\r\n", b"403"),
        (b"GET / HTTP/1.1\r\nhost: localhost:9000\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, b"400"),
        (b"G" * 100_000, b"400"),
    ],
)
async def test_a_scrape_is_answered_and_what_is_none_is_refused(sent, status):
    metrics = Metrics(lambda: ())
    port = metrics.serve(LOOPBACK, 0, None)
    answer = await raw_answer(port, sent)
    await asyncio.to_thread(metrics.close)
    # More than was read may have been on its way, and then the answer may be lost.
    assert answer.startswith(b"HTTP/1.1 " + status) or (answer == b"" and len(sent) > 2**16)


async def test_requests_under_other_hosts_are_counted_and_logged():
    refused = RefusedCalls(LocalCounts())
    metrics = Metrics(lambda: ())
    with capture_logs() as lines:
        port = metrics.serve(LOOPBACK, 0, None, refused=refused)
        await raw_answer(port, b"GET / HTTP/1.1\r\nhost: evil.example:9000\r\n\r\n")
        await asyncio.to_thread(metrics.close)
    assert refused.num_calls == 1
    [line] = [line for line in lines if line["event"] == "host_refused"]
    assert (line["host"], line["peer"]) == ("evil.example:9000", LOOPBACK)


async def test_callers_that_say_nothing_give_way():
    metrics = Metrics(lambda: ())
    port = metrics.serve(LOOPBACK, 0, None)
    silent = [
        await asyncio.open_connection(LOOPBACK, port)
        for _ in range(MAX_CONNECTIONS_PER_ADDRESS + 1)
    ]
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.get(f"http://{LOOPBACK}:{port}")).status_code == 200
    assert await silent[0][0].read() == b""
    await asyncio.to_thread(metrics.close)
    for reader, writer in silent:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()


async def test_a_caller_that_does_not_ask_in_time_is_cut(monkeypatch):
    monkeypatch.setattr(metrics_server, "CALLER_TIMEOUT_S", 0.01)
    metrics = Metrics(lambda: ())
    port = metrics.serve(LOOPBACK, 0, None)
    assert await raw_answer(port, b"GET / HTTP/1.1\r\n") == b""
    await asyncio.to_thread(metrics.close)
