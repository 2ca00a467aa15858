"""A listener takes connections within limits, also while they shake hands."""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

from services.transport.connections import Connections, Place
from services.transport.counts import LocalCounts
from services.transport.listener import Listener
from services.transport.tls import ServerTls
from tests.support.certificates import LOOPBACK, Authority
from tests.support.waiting import until


class Greeter(asyncio.Protocol):
    """Says what it has to say."""

    greeting = b"hello\n"

    def __init__(self, place: Place) -> None:
        self._place = place

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._place.work()
        transport.write(self.greeting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()


@contextlib.asynccontextmanager
async def listening(
    counts: LocalCounts, tls: ssl.SSLContext | None, *, timeout_s: float = 60, protocol=Greeter
):
    listening = socket.create_server((LOOPBACK, 0))
    connections = Connections(counts, "c", limit=1, limit_per_address=1)
    listener = Listener(listening, connections, protocol, tls=tls, handshake_timeout_s=timeout_s)
    listener.start()
    try:
        yield listening.getsockname()[1]
    finally:
        await listener.close()


@contextlib.asynccontextmanager
async def connected(port: int, tls: ssl.SSLContext | None = None):
    reader, writer = await asyncio.open_connection(LOOPBACK, port, ssl=tls)
    try:
        yield reader
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server and of a client that trusts it."""
    authority = Authority(folder)
    pair = authority.issue("server", LOOPBACK)
    server = ServerTls(cert=pair.cert, key=pair.key, client_ca=None)
    return server.ssl_context(), ssl.create_default_context(cafile=authority.cert)


async def test_a_lost_connection_frees_its_slot():
    counts = LocalCounts()
    async with listening(counts, None) as port:
        async with connected(port) as reader:
            assert await reader.readline() == b"hello\n"
            async with connected(port) as refused:
                with contextlib.suppress(ConnectionError):
                    assert await refused.read() == b""
        await until(lambda: not counts.held("c"))
        async with connected(port) as reader:
            assert await reader.readline() == b"hello\n"


async def test_the_kernel_takes_little_of_what_a_peer_does_not_read():
    talking = []

    class Talker(Greeter):
        greeting = bytes(4 * 2**20)

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            talking.append(transport)

    async with listening(LocalCounts(), None, protocol=Talker) as port:
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            peer.setblocking(False)
            await asyncio.get_running_loop().sock_connect(peer, (LOOPBACK, port))
            await until(lambda: talking)
            assert talking[0].get_write_buffer_size() > 3 * 2**20


async def test_a_handshake_that_stalls_gives_way(tmp_path):
    counts = LocalCounts()
    server, client = contexts(tmp_path)
    async with listening(counts, server) as port:
        async with connected(port) as stalled:
            await until(lambda: counts.held("c"))
            async with connected(port, client) as reader:
                assert await reader.readline() == b"hello\n"
            with contextlib.suppress(ConnectionError):
                assert await stalled.read() == b""
        await until(lambda: not counts.held("c"))


async def test_a_handshake_that_is_too_slow_or_invalid_frees_its_slot(tmp_path):
    counts = LocalCounts()
    server, _ = contexts(tmp_path)
    async with listening(counts, server, timeout_s=0.01) as port:
        async with connected(port) as stalled:
            with contextlib.suppress(ConnectionError):
                assert await stalled.read() == b""
        await until(lambda: not counts.held("c"))


async def test_handshakes_under_way_end_with_the_listener(tmp_path):
    counts = LocalCounts()
    server, _ = contexts(tmp_path)
    async with listening(counts, server) as port, connected(port):
        await until(lambda: counts.held("c"))
    assert not counts.held("c")
