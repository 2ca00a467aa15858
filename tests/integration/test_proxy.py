"""The shipped proxy configuration, where HAProxy is installed."""

import asyncio
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.certificates import LOOPBACK, Authority
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import FrontendStack, frontend_stack
from tests.support.processes import free_port
from tests.support.raw_http2 import (
    END_HEADERS,
    FIRST_DYNAMIC_ENTRY,
    HEADERS,
    INDEXED,
    call_headers,
    frame,
    header,
    raw_connection,
)

CONFIG = Path(__file__).parents[2] / "deploy" / "proxy" / "haproxy.cfg"
GENERATE = pb.GenerateRequest(text="one two")
MAX_CONNECTIONS_OF_AN_ADDRESS = 64

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="HAProxy is not installed")


@dataclass
class Proxied:
    """A frontend and the proxy in front of it."""

    stack: FrontendStack
    address: str
    authority: Authority

    def channel(self) -> grpc.aio.Channel:
        roots = grpc.ssl_channel_credentials(self.authority.cert.read_bytes())
        return grpc.aio.secure_channel(self.address, roots)

    def tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.authority.cert))
        context.set_alpn_protocols(["h2"])
        return context


@asynccontextmanager
async def proxied(folder: Path) -> AsyncIterator[Proxied]:
    authority = Authority(folder)
    pair = authority.issue("proxy", LOOPBACK)
    bundle = folder / "bundle.pem"
    bundle.write_bytes(pair.cert.read_bytes() + pair.key.read_bytes())
    address = f"{LOOPBACK}:{free_port()}"
    async with FakeEngine() as engine, frontend_stack(engine, http_port=0) as stack:
        process = subprocess.Popen(  # noqa: ASYNC220  it starts at once
            ["haproxy", "-f", str(CONFIG), "-db"],
            env=os.environ
            | {
                "OCTAVO_PROXY_BIND": address,
                "OCTAVO_PROXY_CERT": str(bundle),
                "OCTAVO_GRPC": stack.address,
                "OCTAVO_HTTP": stack.http_url.removeprefix("http://"),
            },
        )
        try:
            proxy = Proxied(stack, address, authority)
            async with proxy.channel() as channel:
                await FrontendServiceStub(channel).ListModels(
                    pb.ListModelsRequest(), wait_for_ready=True, timeout=60
                )
            yield proxy
        finally:
            process.terminate()
            process.wait()


async def test_calls_and_sessions_pass_through(tmp_path):
    async with proxied(tmp_path) as proxy, proxy.channel() as channel:
        stub = FrontendServiceStub(channel)
        parts = [response.output.text async for response in stub.Generate(GENERATE)]
        assert "".join(parts) == "hello world"
        session = stub.Session()
        text = ""
        for handle in (1, 2):
            await session.write(pb.SessionRequest(handle=handle, generate=GENERATE))
            while not text.endswith("hello world"):
                text += (await session.read()).output.text
            text = ""
        session.cancel()


async def test_headers_that_expand_never_reach_the_frontend(tmp_path):
    path = "/octavo.frontend.v1.FrontendService/Session"
    bomb = call_headers(path) + header("x", "y" * 3900, INDEXED) + 100 * FIRST_DYNAMIC_ENTRY
    async with proxied(tmp_path) as proxy, raw_connection(proxy.address, proxy.tls()) as connection:
        connection.send(frame(HEADERS, END_HEADERS, 1, bomb))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await connection.ended_stream()
        async with proxy.channel() as channel:
            await FrontendServiceStub(channel).ListModels(pb.ListModelsRequest())


async def test_an_address_has_a_limited_number_of_connections(tmp_path):
    async with proxied(tmp_path) as proxy:
        writers: list[asyncio.StreamWriter] = []
        # The channel that waited for the proxy may count for a while, so any of them may be closed.
        connecting = [
            asyncio.create_task(is_closed(proxy.address, writers))
            for _ in range(MAX_CONNECTIONS_OF_AN_ADDRESS + 1)
        ]
        ended, waiting = await asyncio.wait(connecting, return_when=asyncio.FIRST_COMPLETED)
        assert all(task.result() for task in ended)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()


async def is_closed(address: str, writers: list[asyncio.StreamWriter]) -> bool:
    """Connects, says nothing, and returns whether the other end hung up rather than answered."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return not await reader.read(1)
    except ConnectionError:
        return True
