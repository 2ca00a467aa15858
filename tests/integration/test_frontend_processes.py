"""Several processes of the frontend on one port: limits, figures, a death and the end."""

import asyncio
import os
import signal
import socket
from contextlib import AsyncExitStack

import httpx
import psutil
import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.support.fake_engine import FakeEngine, says
from tests.support.processes import ServiceProcess, free_port, start_frontend
from tests.support.waiting import until

KEY = "a-long-enough-secret"
MAX_LIVE = 4
NUM_LOOKS = 3000
"""Looks of 0.05 s for what must come: minutes, for a machine that does much else."""
# The process that forks the others must not have imported gRPC.
pytestmark = pytest.mark.usefixtures("services_are_started")
ASK = {
    "model": "fake",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
}


async def serving(frontend, url, num_processes):
    """Waits until all processes have an engine, as the joint figures say."""

    async def are_ready() -> bool:
        children = psutil.Process(frontend.pid).children()
        figures = await figures_of(url)
        cpu = figures.get("octavo_frontend_event_loop_lag_seconds_count", 0)
        return (
            len(children) == num_processes
            and figures["octavo_frontend_engine_ready"] == 1
            and frontend.log.count('"event": "frontend_listening"') >= num_processes
            and cpu > 0
        )

    for _ in range(NUM_LOOKS):
        try:
            if await are_ready():
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.05)
    pytest.fail(frontend.log)


async def figures_of(url):
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as client:
        lines = (await client.get(f"{url}/metrics", timeout=30)).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def until_figure(url, name, value):
    for _ in range(NUM_LOOKS):
        if (await figures_of(url)).get(name) == value:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{name} never became {value}: {(await figures_of(url)).get(name)}")


def serving_pids(frontend):
    """Ids of the processes that serve; their own children run templates."""
    return [child.pid for child in psutil.Process(frontend.pid).children()]


async def test_limits_and_figures_hold_over_all_and_a_dead_process_is_replaced(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.a]\nkey = "{KEY}"\nmax_live_requests = {MAX_LIVE}\n')
    keys.chmod(0o600)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    engine = FakeEngine(script=says("one two " * 100, eos=False), hold_at=3)
    async with (
        engine,
        start_frontend(engine.address, http_port=port, processes=3, api_keys_file=keys) as frontend,
        AsyncExitStack() as stack,
    ):
        await serving(frontend, url, 3)
        statuses, streams = [], []
        for _ in range(3 * MAX_LIVE):  # each has a connection, and so a process, of its own
            headers = {"authorization": f"Bearer {KEY}"}
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, headers=headers, timeout=60)
            )
            request = client.build_request("POST", "/v1/chat/completions", json=ASK)
            stream = await client.send(request, stream=True)
            statuses.append(stream.status_code)
            streams.append(stream)
        assert statuses == [200] * MAX_LIVE + [429] * (2 * MAX_LIVE)
        refused = 'octavo_frontend_requests_failed_total{error="OverloadedError"}'
        await until_figure(url, "octavo_frontend_requests_live", MAX_LIVE)
        await until_figure(url, refused, 2 * MAX_LIVE)

        before = serving_pids(frontend)
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: len(set(serving_pids(frontend)) - set(before)) == 1)
        await until(lambda: frontend.log.count('"event": "frontend_listening"') == 4)
        await until_figure(url, refused, 2 * MAX_LIVE)
        for stream in streams:
            await stream.aclose()
        await until_figure(url, "octavo_frontend_requests_live", 0)
        engine.hold_at = None
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as chats:
            answers = await asyncio.gather(
                *(chats.chat.completions.create(**ASK | {"stream": False}) for _ in range(MAX_LIVE))
            )
        assert {answer.usage.completion_tokens for answer in answers} == {100}
        assert '"event": "process_lost"' in frontend.log


async def test_a_running_request_finishes_before_the_end():
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    engine = FakeEngine(script=says("one two " * 100, eos=False), hold_at=3)
    async with (
        engine,
        start_frontend(engine.address, http_port=port, processes=2) as frontend,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        await serving(frontend, url, 2)
        request = client.build_request("POST", "/v1/chat/completions", json=ASK)
        stream = await client.send(request, stream=True)
        frontend.signal(signal.SIGTERM)
        await until(lambda: frontend.log.count('"event": "signal_received"') == 3)
        engine.hold_at = None
        assert (await stream.aread()).endswith(b"data: [DONE]\n\n")
        await until(lambda: not frontend.is_running)
        assert frontend.returncode == 0


@pytest.mark.parametrize("what", ["port", "metrics_port", "keys"])
def test_a_start_that_must_fail_ends_all_with_its_reason(what, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags, reason = {
            "port": ({"port": port}, f"cannot listen on 127.0.0.1:{port}"),
            "metrics_port": ({"port": 0, "metrics_port": port}, "Address already in use"),
            "keys": (
                {"port": free_port(), "api_keys_file": tmp_path / "absent"},
                "absent cannot be read",
            ),
        }[what]
        frontend = ServiceProcess(
            "services.frontend", {"processes": 2, "engine_address": "127.0.0.1:1", **flags}
        )
        frontend.start()
        try:
            # Its health is not asked: no answer would come from a port that is taken.
            assert frontend.wait(60) == 1
        finally:
            frontend.kill()
    assert reason in frontend.log


async def test_responses_are_not_stored_and_say_so():
    port = free_port()
    engine = FakeEngine(script=says("four"))
    async with (
        engine,
        start_frontend(engine.address, http_port=port, processes=2) as frontend,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        await serving(frontend, f"http://127.0.0.1:{port}", 2)
        first = await client.responses.create(model="fake", input="2 + 2?")
        assert (first.output_text, first.to_dict()["store"]) == ("four", False)
        with pytest.raises(NotFoundError, match="stores no responses: send all items"):
            await client.responses.create(
                model="fake", input="And more?", previous_response_id=first.id
            )
