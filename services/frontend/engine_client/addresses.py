"""Which engines the configured addresses stand for."""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

log = structlog.get_logger()


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

    def __init__(self, configured: Sequence[str]) -> None:
        """Resolves nothing yet.

        Args:
            configured: host:port, where a host may be a name of several engines, or any other gRPC
                target, which is one engine.
        """
        self._resolved: dict[str, list[EngineAddress]] = {
            text: [] if _is_name(text) else [EngineAddress(text)] for text in configured
        }
        self._problems: dict[str, str] = {}
        self.has_names = any(map(_is_name, configured))
        """Whether there is anything that `refresh` may find changed."""

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
                found = await asyncio.get_running_loop().getaddrinfo(
                    host, int(port), type=socket.SOCK_STREAM
                )
            except OSError as error:
                self._note_problem(name, f"{host} cannot be resolved: {error}")
                continue
            self._problems.pop(name, None)
            targets = sorted({_target(entry[4][0], int(port)) for entry in found})
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


def _target(host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
