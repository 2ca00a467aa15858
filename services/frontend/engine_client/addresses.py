"""Which engines the configured addresses stand for."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import structlog

log = structlog.get_logger()

Lookup = Callable[[str], Awaitable[Collection[str]]]
"""Finds the IP addresses of a host name, or raises OSError."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where one engine is."""

    target: str
    """As gRPC dials it."""
    authority: str | None = None
    """The configured name, host and port, that `target` was resolved from; a certificate must
    have it. None where nothing was resolved."""


class AddressBook:
    """The configured addresses, and what their names resolved to last."""

    def __init__(self, configured: Sequence[str], *, lookup: Lookup | None = None) -> None:
        """Resolves nothing yet.

        Args:
            configured: host:port, where a host may be a name of several engines, or any other gRPC
                target, which is one engine.
            lookup: finds the IP addresses of a host name; the system's resolver by default.
        """
        self._lookup = lookup or _ask_system
        self._resolved: dict[str, list[EngineAddress]] = {
            text: [] if _is_name(text) else [EngineAddress(text)] for text in configured
        }
        self._problems: dict[str, str] = {}

    @property
    def addresses(self) -> list[EngineAddress]:
        """All engines, each once, in the order of configuration."""
        found = (address for addresses in self._resolved.values() for address in addresses)
        return list({address.target: address for address in found}.values())

    @property
    def problem(self) -> str:
        """Why names could not be resolved; empty when they could."""
        return "; ".join(self._problems.values())

    async def refresh(self) -> None:
        """Resolves the names again; one that cannot be resolved keeps what it had."""
        for name in filter(_is_name, self._resolved):
            host, _, port = name.rpartition(":")
            try:
                found = await self._lookup(host)
            except (OSError, UnicodeError) as error:  # a name may be no name at all
                self._note_problem(name, f"{host} cannot be resolved: {error}")
                continue
            self._problems.pop(name, None)
            targets = [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in sorted(found)]
            self._resolved[name] = [EngineAddress(target, authority=name) for target in targets]

    def _note_problem(self, name: str, problem: str) -> None:
        if self._problems.get(name) != problem:
            log.warning("engine_name_unresolved", reason=problem)
        self._problems[name] = problem


def _is_name(configured: str) -> bool:
    """Whether an address is a host name with a port.

    A name of this machine is none: its several addresses lead to one engine, and gRPC tries them.
    """
    host, _, port = configured.rpartition(":")
    if not port.isdigit() or not host or ":" in host or "/" in host or host == "localhost":
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


async def _ask_system(host: str) -> set[str]:
    """Returns the addresses that the system's resolver knows."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(entry[4][0]) for entry in found}
