"""Calls that are never finished, and sessions that are never used, take bounded room."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.frontend.v1 import frontend_pb2 as pb
from services.transport.health import MAX_WATCHES_PER_ADDRESS
from services.transport.requests import OPEN_SLOTS
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack
from tests.support.passing_time import pass_time
from tests.support.raw_http2 import (
    DATA,
    END_HEADERS,
    HEADERS,
    call_headers,
    frame,
    message_start,
    raw_connection,
)
from tests.support.waiting import until

KEY = "alice-0123456789abcdef"
METADATA = [("authorization", f"Bearer {KEY}")]
METHODS = ("Generate", "Chat", "Tokenize", "Session")
CHECK = "/grpc.health.v1.Health/Check"
REQUEST = pb.SessionRequest(handle=1, generate=pb.GenerateRequest(text="one two"))


def unfinished(stream_id: int, path: str, **metadata: str) -> bytes:
    """A call whose message of 1 MiB never goes on after its first byte."""
    return frame(HEADERS, END_HEADERS, stream_id, call_headers(path, **metadata)) + frame(
        DATA, 0, stream_id, message_start(2**20, b"x")
    )


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nkey = "{KEY}"\n')
    return path


async def test_a_caller_without_a_key_is_refused_before_its_message_is_received(key_file):
    async with (
        FakeEngine() as engine,
        frontend_stack(engine, api_keys_file=key_file) as stack,
        raw_connection(stack.address) as connection,
    ):
        for index, method in enumerate(METHODS):
            path = f"/octavo.frontend.v1.FrontendService/{method}"
            connection.send(unfinished(1 + 2 * index, path))
        ended = {await connection.ended_stream() for _ in METHODS}
        assert ended == {1, 3, 5, 7}


async def test_unfinished_probes_keep_no_other_probe_out():
    async with (
        FakeEngine() as engine,
        frontend_stack(engine) as stack,
        raw_connection(stack.address) as connection,
    ):
        connection.send(*(unfinished(1 + 2 * n, CHECK) for n in range(OPEN_SLOTS + 2)))
        ended = {await connection.ended_stream() for _ in range(2)}
        assert ended <= {1 + 2 * n for n in range(OPEN_SLOTS + 2)}
        answer = await health_pb2_grpc.HealthStub(stack.channel).Check(
            health_pb2.HealthCheckRequest()
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_one_address_watches_health_a_limited_number_of_times():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        stub = health_pb2_grpc.HealthStub(stack.channel)
        watches = [
            stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_WATCHES_PER_ADDRESS)
        ]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError, match="16 watches are open") as refused:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_one_key_has_a_quarter_of_the_sessions(key_file):
    key_file.write_text(key_file.read_text() + f'[keys.bob]\nkey = "bob-{KEY}"\n')
    async with (
        FakeEngine() as engine,
        frontend_stack(engine, max_sessions=4, api_keys_file=key_file) as stack,
    ):
        first = stack.stub.Session(metadata=METADATA)
        await first.initial_metadata()
        with pytest.raises(grpc.aio.AioRpcError, match="1 sessions are open for this caller"):
            await stack.stub.Session(metadata=METADATA).read()
        other = stack.stub.Session(metadata=[("authorization", f"Bearer bob-{KEY}")])
        await other.initial_metadata()
        first.cancel()
        other.cancel()


async def test_an_idle_session_is_ended_and_one_with_a_request_is_not(monkeypatch):
    async with (
        FakeEngine() as engine,
        frontend_stack(engine, session_idle_timeout_s=40.0) as stack,
    ):
        engine.pause()
        # First, so that its time runs before the time passes.
        idle = stack.stub.Session()
        await idle.initial_metadata()
        busy = stack.stub.Session()
        await busy.write(REQUEST)
        await until(lambda: engine.live)
        pass_time(monkeypatch, 50.0)
        with pytest.raises(grpc.aio.AioRpcError, match="the session was idle for 40 s") as ended:
            await idle.read()
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        engine.resume()
        text = ""
        while not text.endswith("hello world"):
            text += (await busy.read()).output.text
        busy.cancel()
