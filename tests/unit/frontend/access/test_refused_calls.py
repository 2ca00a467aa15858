"""Callers without a key cannot fill the log."""

import grpc
import pytest
from structlog.testing import capture_logs

from services.frontend.access.gate import Gate
from services.frontend.errors import UnauthenticatedError
from services.frontend.http.app import ERRORS
from services.frontend.http.wire.access import RequireHost, RequireKey
from services.frontend.rpc.access import AccessInterceptor
from services.transport.counts import LocalCounts
from services.transport.hosts import AllowedHosts

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


async def no_app(scope, receive, send):
    raise AssertionError


async def status_of(app, *headers: tuple[bytes, bytes]) -> int:
    statuses: list[int] = []

    async def send(message):
        statuses.append(message.get("status"))

    scope = {"type": "http", "path": "/v1/models", "method": "GET", "client": None}
    await app(scope | {"headers": list(headers)}, None, send)
    return statuses[0]


async def refuse_over_http(gate: Gate) -> None:
    assert await status_of(RequireKey(no_app, gate, ERRORS)) == 401


async def refuse_host(gate: Gate) -> None:
    app = RequireHost(no_app, AllowedHosts("127.0.0.1"), gate.refused, ERRORS)
    assert await status_of(app, (b"host", b"evil.example" + b"." * 5000)) == 403


@pytest.mark.parametrize("refuse", [refuse_over_grpc, refuse_over_http, refuse_host])
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
    assert len(str(lines)) < 1000 * len(lines)
