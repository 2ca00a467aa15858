"""Client certificates are known by their whole names."""

from pathlib import Path

import grpc
import pytest

from services.engine.edge.status import status_of
from services.engine.rpc.known_clients import KnownClients
from services.transport.counts import LocalCounts
from services.transport.interceptors import ErrorInterceptor
from services.transport.refused_calls import RefusedCalls
from tests.support.certificates import LOOPBACK, Authority, Pair, credentials

FRONTEND = "frontend.internal"
DENIED = grpc.StatusCode.PERMISSION_DENIED


class Methods(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(request, context):
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


async def code_of_call(authority: Authority, server: Pair, client: Pair) -> grpc.StatusCode:
    pair = (server.key.read_bytes(), server.cert.read_bytes())
    trusted = authority.cert.read_bytes()
    known = KnownClients([FRONTEND], RefusedCalls(LocalCounts()))
    listening = grpc.aio.server(interceptors=[ErrorInterceptor(status_of), known])
    listening.add_generic_rpc_handlers([Methods()])
    port = listening.add_secure_port(
        f"{LOOPBACK}:0", grpc.ssl_server_credentials([pair], trusted, require_client_auth=True)
    )
    await listening.start()
    try:
        async with grpc.aio.secure_channel(
            f"{LOOPBACK}:{port}", credentials(authority, client)
        ) as channel:
            call = channel.unary_unary("/t/unary")(b"", timeout=30)
            return await call.code()
    finally:
        await listening.stop(None)


@pytest.mark.parametrize(
    ("common_name", "dns_names", "code"),
    [
        (FRONTEND, (), grpc.StatusCode.OK),
        ("x", (FRONTEND,), grpc.StatusCode.OK),
        ("", (FRONTEND,), grpc.StatusCode.OK),
        ("x", ("other", FRONTEND), grpc.StatusCode.OK),
        (f"{FRONTEND}.evil", (), DENIED),
        (FRONTEND, ("other",), DENIED),
        (f"{FRONTEND}\0.evil", (), DENIED),
        ("x", (f"{FRONTEND}\0.evil",), DENIED),
        ("x", (f"{FRONTEND}\0",), DENIED),
    ],
)
async def test_a_name_that_goes_on_after_a_nul_is_not_the_name_before_it(
    tmp_path: Path, common_name: str, dns_names: tuple[str, ...], code: grpc.StatusCode
):
    authority = Authority(tmp_path)
    client = authority.issue_named(common_name, *dns_names)
    assert await code_of_call(authority, authority.issue("server", LOOPBACK), client) == code
