"""Accepts the connections of one port within limits, TLS handshakes included."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable

import structlog

from services.telemetry.connections import Connections, Place

ACCEPT_PAUSE_S = 1.0
"""How long no connection is accepted after the process ran out of descriptors or memory."""
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

log = structlog.get_logger()


class Listener:
    """Takes connections from a listening socket and gives each to a protocol of its own.

    A connection has its place before its handshake begins, since a server of asyncio's own would
    let any number of peers stall theirs.
    """

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        make_protocol: Callable[[Place], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        """Accepts nothing until `start`.

        Args:
            listening: the socket; it is closed with the listener.
            connections: gives each connection its place.
            make_protocol: makes a connection's protocol. When the connection is made it says
                whether its place may be taken (`wait` or `work`); when it is lost it leaves it.
            tls: what to shake hands with; None serves in plain text.
            handshake_timeout_s: time that a handshake may take.
        """
        self._listening = listening
        self._listening.setblocking(False)
        self._connections = connections
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._accepting: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to accept connections in the running event loop."""
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Closes the port and ends handshakes; connections that are open go on."""
        if self._accepting is not None:
            await _cancel({self._accepting})
        await _cancel(self._connecting)
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    log.warning("connections_not_accepted", error=error.strerror)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            place = self._connections.take(address[0])
            if place is None:
                connection.close()
            else:
                task = asyncio.create_task(self._connect(connection, place))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)
                place.wait(task.cancel)
            await asyncio.sleep(0)  # a flood of connections does not hold the event loop

    async def _connect(self, connection: socket.socket, place: Place) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(place),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._handshake_timeout_s,
            )
        except OSError:  # errors of TLS and timeouts, too: the peer's mistake
            place.leave()
        except asyncio.CancelledError:
            place.leave()
            raise


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
