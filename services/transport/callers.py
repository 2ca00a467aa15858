"""Names of callers for limits that hold for each of them."""

import ipaddress
from collections.abc import Callable
from urllib.parse import unquote

import grpc

Party = Callable[[grpc.aio.ServicerContext], str]
"""Names the caller whose limits a call counts against."""


def by_address(context: grpc.aio.ServicerContext) -> str:
    """Names a caller by its address."""
    return f"address/{address_of(context.peer())}"


def by_connection(context: grpc.aio.ServicerContext) -> str:
    """Names a caller by its connection."""
    return f"connection/{context.peer()}"


def address_of(peer: str) -> str:
    """Returns the address in a peer's name, without its port.

    An IPv6 host usually has a whole /64, so the network stands for it.

    Args:
        peer: as gRPC writes it, such as "ipv4:192.0.2.1:4711" or "ipv6:%5B2001:db8::1%5D:4711".
    """
    host = unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
