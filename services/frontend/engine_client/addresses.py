"""The engines that the configured addresses resolve to."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import structlog

log = structlog.get_logger()

Lookup = Callable[[str], Awaitable[Collection[str]]]
"""Resolves a host name to IP addresses, or raises OSError."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of one engine."""

    target: str
    """The target that gRPC dials."""
    authority: str | None = None
    """The configured host:port that `target` was resolved from; the certificate must name it. None
    if nothing was resolved."""


class AddressBook:
    """The configured addresses and the latest results of resolving them."""

    def __init__(self, configured: Sequence[str], *, lookup: Lookup | None = None) -> None:
        """Takes host:port, where a host may resolve to several engines, or any gRPC target."""
        self._lookup = lookup or _ask_system
        self._resolved: dict[str, list[EngineAddress]] = {
            text: [] if _is_name(text) else [EngineAddress(text)] for text in configured
        }
        self._problems: dict[str, str] = {}

    @property
    def addresses(self) -> list[EngineAddress]:
        """All engines, without duplicates, in the order of configuration."""
        found = (address for addresses in self._resolved.values() for address in addresses)
        return list({address.target: address for address in found}.values())

    @property
    def problem(self) -> str:
        """Why names could not be resolved; empty if all were."""
        return "; ".join(self._problems.values())

    async def refresh(self) -> None:
        """Resolves the names again; a name that fails keeps its former addresses."""
        for name in filter(_is_name, self._resolved):
            host, _, port = name.rpartition(":")
            try:
                found = await self._lookup(host)
            except (OSError, UnicodeError) as error:  # the name may be malformed
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
    """Whether an address is a host name with a port; this machine's names lead to one engine."""
    host, _, port = configured.rpartition(":")
    if not port.isdigit() or not host or ":" in host or "/" in host or host == "localhost":
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


async def _ask_system(host: str) -> set[str]:
    """Asks the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(entry[4][0]) for entry in found}
