"""Addresses to listen on."""

from collections.abc import Mapping


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
