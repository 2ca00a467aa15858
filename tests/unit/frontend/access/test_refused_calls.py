"""Callers without a key cannot fill the log."""

import grpc
import pytest
from structlog.testing import capture_logs

from services.frontend.access.gate import Gate
from services.frontend.errors import UnauthenticatedError
from services.frontend.http.app import ERRORS
from services.frontend.http.wire.access import RequireKey
from services.frontend.rpc.access import AccessInterceptor
from services.transport.counts import LocalCounts

NUM_CALLS = 100


class Call:
    """The context of a call."""

    def peer(self) -> str:
        return "ipv4:192.0.2.1:1"


class Details:
    """A call of a method, without a key."""

    method = "/t/unary"
    invocation_metadata = ()


async def refuse_over_grpc(gate: Gate) -> None:
    async def method(request, context):
        raise AssertionError

    async def find(details):
        return grpc.unary_unary_rpc_method_handler(method)

    handler = await AccessInterceptor(gate).intercept_service(find, Details())
    with pytest.raises(UnauthenticatedError):
        await handler.unary_unary(b"", Call())


async def refuse_over_http(gate: Gate) -> None:
    async def app(scope, receive, send):
        raise AssertionError

    async def send(message):
        statuses.add(message.get("status", 401))

    statuses: set[int] = set()
    scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": [], "client": None}
    await RequireKey(app, gate, ERRORS)(scope, None, send)
    assert statuses == {401}


@pytest.mark.parametrize("refuse", [refuse_over_grpc, refuse_over_http])
async def test_refused_calls_are_all_counted_and_some_are_logged(tmp_path, refuse):
    path = tmp_path / "keys.toml"
    path.write_text('[keys.alice]\nkey = "alice-0123456789"\n')
    now_s = 0.0
    gate = Gate(path, counts=LocalCounts(clock=lambda: now_s))
    with capture_logs() as lines:
        for _ in range(NUM_CALLS):
            await refuse(gate)
        num_at_once = len(lines)
        now_s += 3600
        await refuse(gate)
    assert 0 < num_at_once <= 10
    assert lines[-1]["num_unlogged"] == NUM_CALLS - num_at_once
    assert gate.refused.num_calls == NUM_CALLS + 1
