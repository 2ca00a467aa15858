"""Names under which callers of HTTP may ask for a server.

A web page whose name resolves to a loopback address after it was loaded has the same origin as the
server there, and no rule of browsers protects that. The page's name is still in Host.
"""

import ipaddress
from collections.abc import Collection

_LOCALHOST = "localhost"


class AllowedHosts:
    """Decides which values of Host are answered."""

    def __init__(self, listen_host: str, names: Collection[str] = ()) -> None:
        """Allows all hosts unless there are names or the address is a loopback one.

        Args:
            listen_host: the address that is listened on.
            names: hosts that are allowed besides loopback ones and, where the address is another
                one, other addresses, which no name can pretend to be.
        """
        self._names = frozenset(name.lower() for name in names)
        self._is_loopback = _is_loopback(listen_host)
        self.are_all = not names and not self._is_loopback

    def allow(self, header: str | None) -> bool:
        """Whether to answer a request with this Host; browsers send one always."""
        if self.are_all or header is None:
            return True
        host = _without_port(header).lower().removesuffix(".")
        is_other_address = not self._is_loopback and _address(host) is not None
        return _is_loopback(host) or host in self._names or is_other_address


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == _LOCALHOST or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
