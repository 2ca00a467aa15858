"""Limits the connections of one port, in all and from one address."""

import ipaddress
from collections.abc import Callable

from services.transport.counts import Counts

IPV6_PREFIX_BITS = 64
"""One host is commonly given a network of this prefix, so its addresses count together."""


class Connections:
    """Admits connections up to a limit, in all and from one address.

    At the limit, the connection that has waited longest for its peer gives way, so that
    idle connections never lock a new one out.
    """

    def __init__(self, counts: Counts, name: str, *, limit: int, limit_per_address: int) -> None:
        """Counts in `counts` under `name`, and under `name` with each address."""
        self._counts = counts
        self._name = name
        self._limit = limit
        self._limit_per_address = limit_per_address
        self._waiting: dict[Place, Callable[[], object]] = {}  # who waits longest comes first

    def take(self, host: str) -> "Place | None":
        """Returns a place for a connection from `host`; None if none is left and none gives way."""
        address = address_of(host)
        own = f"{self._name}/{address}"
        while not self._counts.take(own, limit=self._limit_per_address):
            if not self._make_way(address):
                return None
        while not self._counts.take(self._name, limit=self._limit):
            if not self._make_way(None):
                self._counts.give_back(own)
                return None
        return Place(self, address)

    def wait(self, place: "Place", close: Callable[[], object]) -> None:
        """Lets a connection give way from now on; `close` then ends it."""
        self._waiting.pop(place, None)
        self._waiting[place] = close

    def work(self, place: "Place") -> None:
        """Lets a connection keep its place."""
        self._waiting.pop(place, None)

    def leave(self, place: "Place") -> None:
        """Gives a place back."""
        self._waiting.pop(place, None)
        self._counts.give_back(self._name)
        self._counts.give_back(f"{self._name}/{place.address}")

    def _make_way(self, address: str | None) -> bool:
        """Ends the connection, of `address` if it is given, that has waited longest."""
        for place, close in self._waiting.items():
            if address is None or place.address == address:
                place.leave()
                close()
                return True
        return False


class Place:
    """One connection's place. The connection gives way to others only while it waits."""

    def __init__(self, connections: Connections, address: str) -> None:
        self._connections = connections
        self._is_left = False
        self.address = address
        """The peer's address, or its network where that counts as one."""

    def wait(self, close: Callable[[], object]) -> None:
        """Begins to wait for the peer; `close` is called if the place is needed."""
        if not self._is_left:
            self._connections.wait(self, close)

    def work(self) -> None:
        """Ends the wait: the connection keeps its place."""
        self._connections.work(self)

    def leave(self) -> None:
        """Gives the place back; a second time it does nothing."""
        if not self._is_left:
            self._is_left = True
            self._connections.leave(self)


def address_of(host: str) -> str:
    """Returns what a peer's connections are counted under: its IPv4 address or IPv6 network."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, IPV6_PREFIX_BITS), strict=False))
    return str(address)
