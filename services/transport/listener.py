"""Accepts the connections of one port within limits, TLS handshakes included."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable

import structlog

from services.transport.connections import Connections, Place

ACCEPT_PAUSE_S = 1.0
"""How long no connection is accepted after the process ran out of descriptors or memory."""
MAX_ACCEPTS = 16
"""Connections accepted in one turn of the event loop."""
MAX_UNSENT_BYTES = 2**18
"""Output that the kernel takes before the peer has room for it; the rest waits in the process.
Linux takes 2 to 4 MiB by default, in memory that no limit of ours counts."""
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
        self._connecting: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to accept connections in the running event loop."""
        self._pause = None
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    async def close(self) -> None:
        """Closes the port and ends handshakes; connections that are open go on."""
        asyncio.get_running_loop().remove_reader(self._listening)
        if self._pause is not None:
            self._pause.cancel()
        self._listening.close()
        await asyncio.sleep(0)  # a task that was never begun would not give its place back
        for task in self._connecting:
            task.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(MAX_ACCEPTS):
            try:
                connection, address = self._listening.accept()
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    log.warning("connections_not_accepted", error=error.strerror)
                    loop.remove_reader(self._listening)
                    self._pause = loop.call_later(ACCEPT_PAUSE_S, self.start)
                return
            place = self._connections.take(address[0])
            if place is None:
                connection.close()
                continue
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
            task = loop.create_task(self._connect(connection, place))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket, place: Place) -> None:
        task = asyncio.current_task()
        assert task is not None, "it is one"
        place.wait(task.cancel)
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
