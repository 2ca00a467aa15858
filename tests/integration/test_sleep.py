"""Sleep through both services: the command line, HTTP, rights, routing and the worker's memory."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
import httpx
import psutil
import pytest
from typer.testing import CliRunner

from protos.engine.v1 import operator_pb2, operator_pb2_grpc
from protos.engine.v1.engine_pb2 import GetStatsRequest, GetStatsResponse
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from services.client.cli import app
from tests.support.held import worker_of
from tests.support.pace import frozen
from tests.support.processes import (
    ServiceProcess,
    Stack,
    free_port,
    start_engine,
    start_frontend,
)

OPERATOR, USER = (f"octavo-{name}-0123456789abcdef" for name in ("operator", "user"))
KEYS = f"""
[keys.operator]
key = "{OPERATOR}"
operator = true
[keys.user]
key = "{USER}"
"""
PROMPT = "The quick brown fox"
FLAGS = {"enable_sleep": True, "num_kv_blocks": 64}


@dataclass
class Served:
    engines: list[ServiceProcess]
    url: str

    def call(self, method: str, path: str, key: str = OPERATOR) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=60)

    def complete(self, max_tokens: int = 12) -> httpx.Response:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
        headers = {"authorization": f"Bearer {USER}"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)

    def text(self) -> str:
        """Returns a reply, once an engine takes requests."""
        while self.call("GET", "/health").status_code == 503:
            time.sleep(0.01)
        answer = self.complete()
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("sleep") / "keys.toml"
    keys.write_text(KEYS)
    port = free_port()
    engines = [start_engine(**FLAGS), start_engine(**FLAGS)]
    addresses = ",".join(each.address for each in engines)
    frontend = start_frontend(addresses, http_port=port, api_keys_file=keys, allow_sleep=True)
    with engines[1]:
        engines[1].wait_ready()
        with Stack(engines[0], frontend):
            yield Served(engines, f"http://127.0.0.1:{port}")


def octavo(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def stats_of(engine: ServiceProcess) -> GetStatsResponse:
    with grpc.insecure_channel(engine.address) as channel:
        stats: GetStatsResponse = EngineServiceStub(channel).GetStats(GetStatsRequest())
        return stats


def num_live(engine: ServiceProcess) -> int:
    stats = stats_of(engine)
    return stats.num_running + stats.num_waiting


def test_a_frontend_leaves_out_an_engine_that_sleeps(served: Served) -> None:
    first, second = served.engines
    expected = served.text()
    assert "asleep:" in octavo("sleep", "--engine", first.address)
    assert "asleep, level 1" in octavo("stats", "--engine", first.address)
    num_steps = stats_of(first).num_steps
    assert {served.text() for _ in range(5)} == {expected}
    assert stats_of(first).num_steps == num_steps
    octavo("sleep", "--level", "2", "--engine", second.address)
    refused = served.complete()
    assert refused.status_code == 503
    while served.call("GET", "/health").status_code == 200:
        time.sleep(0.01)
    assert "awake after" in octavo("wake", "--engine", first.address)
    octavo("wake", "--engine", second.address)
    assert stats_of(second).sleep_state == "awake"


def test_http_calls_put_all_engines_to_sleep_for_operators_alone(served: Served) -> None:
    expected = served.text()
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        assert served.call(method, path, USER).status_code == 403
        assert served.call(method, path, "octavo-nobody-0123456789abcdef").status_code == 401
    for query in ("/sleep?level=3", "/sleep?tags=weights", "/wake_up?tags=weights"):
        assert served.call("POST", query).status_code == 400
    for query in ("", "?level=2&mode=abort"):
        assert served.call("GET", "/is_sleeping").json() == {"is_sleeping": False}
        assert served.call("POST", f"/sleep{query}").status_code == 200
        assert served.call("GET", "/is_sleeping").json() == {"is_sleeping": True}
        refused = served.complete()
        assert refused.status_code == 503
        assert served.call("POST", "/wake_up").status_code == 200
        assert served.text() == expected


def test_kept_requests_of_a_sleeping_fleet_go_on_after_waking(served: Served) -> None:
    expected = served.complete(200).json()["choices"][0]["text"]
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(served.complete(200))) for _ in range(6)
    ]
    slept = []
    asked = threading.Thread(target=lambda: slept.append(served.call("POST", "/sleep?mode=keep")))
    with ExitStack() as stack:
        for each in served.engines:  # so that no request ends before its engine falls asleep
            stack.enter_context(frozen(worker_of(each)))
        for thread in threads:
            thread.start()
        while sum(num_live(each) for each in served.engines) < 6:
            time.sleep(0.01)
        asked.start()
        while any(stats_of(each).sleep_state == "awake" for each in served.engines):
            time.sleep(0.01)
    asked.join()
    assert slept[0].status_code == 200
    assert not answers
    waiting = [stats_of(each) for each in served.engines]
    assert sum(each.num_waiting for each in waiting) == 6
    assert [each.num_cached_blocks for each in waiting] == [0, 0]
    served.call("POST", "/wake_up")
    for thread in threads:
        thread.join()
    assert {each.json()["choices"][0]["text"] for each in answers} == {expected}


def test_a_worker_killed_asleep_starts_again_when_the_engine_wakes(served: Served) -> None:
    engine = served.engines[0]
    expected = served.text()
    octavo("sleep", "--engine", engine.address)
    worker = psutil.Process(stats_of(engine).ranks[0].pid)
    worker.kill()
    while stats_of(engine).num_free_blocks:
        time.sleep(0.01)
    assert stats_of(engine).sleep_state == "asleep"
    octavo("wake", "--engine", engine.address)
    assert stats_of(engine).num_worker_restarts == 1
    assert served.text() == expected


def test_an_engine_beyond_loopback_without_known_callers_does_not_sleep() -> None:
    with (
        start_engine(host="0.0.0.0", **FLAGS) as engine,
        grpc.insecure_channel(f"127.0.0.1:{engine.address.rpartition(':')[2]}") as channel,
    ):
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        for call in (
            lambda: stub.Sleep(operator_pb2.SleepRequest(level=1)),
            lambda: stub.Wake(operator_pb2.WakeRequest()),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_http_calls_need_a_flag() -> None:
    port = free_port()
    engine = start_engine(**FLAGS)
    with Stack(engine, start_frontend(engine.address, http_port=port)):
        assert httpx.post(f"http://127.0.0.1:{port}/sleep", timeout=60).status_code == 404
