"""Addresses to listen on, and to connect to over gRPC."""

import ipaddress
import re
from collections.abc import Mapping

MAX_PORT = 65535
_URL = re.compile(r"(https?|grpcs?)://", re.IGNORECASE)
_SCHEME = re.compile(r"(dns|unix|unix-abstract|ipv4|ipv6|vsock|xds):(?!\d+$)\S")
"""Begins a target of gRPC's (grpc/doc/naming.md), whose rest is for gRPC to read."""
_NAME = re.compile(r"[\w.-]+")
_NUMBERS = re.compile(r"[\d.]+")


def bracketed(host: str) -> str:
    """Returns an IPv6 address in brackets, as host:port has it; any other host as it is."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def check_ports(ports: Mapping[str, int | None]) -> None:
    """Refuses one port for two listeners of a service.

    Args:
        ports: flag -> port; None opens none, and 0 a free one.

    Raises:
        ValueError: it names both flags and the port.
    """
    flags: dict[int, str] = {}
    for flag, port in ports.items():
        if port and (other := flags.setdefault(port, flag)) != flag:
            raise ValueError(f"{flag} is {port}: it must differ from {other}")


def checked_address(address: str) -> str:
    """Returns an address that gRPC can dial: host:port, or a target with a scheme of gRPC's.

    Raises:
        ValueError: it is neither; the message has the address and what is wrong with it.
    """
    if _URL.match(address):
        raise ValueError(f"{address[:64]!r} is a URL; gRPC's address is host:port")
    if _SCHEME.match(address):
        return address
    problem = _problem(*address.rpartition(":"))
    if problem:
        raise ValueError(f"{address[:64]!r} is no host:port: {problem}")
    return address


def _problem(host: str, colon: str, port: str) -> str:
    """Returns what is wrong with the parts of host:port; empty if nothing is."""
    if not colon:
        return "there is no port"
    if not host:
        return "there is no host"
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= MAX_PORT):
        return f"the port must be a number from 1 to {MAX_PORT}"
    return _problem_of_host(host)


def _problem_of_host(host: str) -> str:
    in_brackets = host.startswith("[") and host.endswith("]")
    if in_brackets or ":" in host or _NUMBERS.fullmatch(host):
        try:
            ip = ipaddress.ip_address(host[1:-1] if in_brackets else host)
        except ValueError:
            return f"{host[:64]!r} is no IP address"
        if (ip.version == 6) != in_brackets:
            return "an IPv6 address, and no other, is written in brackets"
        return ""
    try:
        host.encode("idna")
    except UnicodeError:
        return f"{host[:64]!r} is no name"
    return "" if _NAME.fullmatch(host) else f"{host[:64]!r} is no name"
