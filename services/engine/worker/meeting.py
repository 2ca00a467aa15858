"""Where the ranks of an engine find each other when they start. No torch here."""

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from typing import Self

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_NAME_BYTES = 15
"""Longest name of an interface (IFNAMSIZ less the zero at its end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A place where ranks meet.

    fd: on one host, a file that all ranks have open; on several hosts, rank 0's listening socket.
    address: of this socket, as host:port; empty on one host.
    """

    fd: int | None = None
    address: str = ""

    @classmethod
    def in_memory(cls) -> Self:
        """Opens a file without a name, which is gone with the last process that has it."""
        return cls(fd=os.memfd_create("octavo-ranks"))

    @classmethod
    def on_interface(cls, name: str) -> Self:
        """Opens a free port of a network interface, and of no other.

        Raises:
            ValueError: the interface does not exist or has no address.
        """
        with socket.socket() as listening:
            listening.bind((interface_address(name), 0))
            listening.listen(128)
            host, port = listening.getsockname()
            return cls(fd=listening.detach(), address=f"{host}:{port}")

    @property
    def arguments(self) -> list[str]:
        """The arguments of a worker's command line that name this place."""
        given = [] if self.fd is None else ["--meeting-fd", str(self.fd)]
        return given + (["--meeting-address", self.address] if self.address else [])

    def close(self) -> None:
        """Closes this process's descriptor; ranks that have inherited it keep theirs."""
        if self.fd is not None:
            os.close(self.fd)


def interface_address(name: str) -> str:
    """Returns the IPv4 address of a network interface.

    Raises:
        ValueError: the interface does not exist or has no address.
    """
    with socket.socket(type=socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", name.encode()[:_NAME_BYTES])
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
        except OSError as error:
            raise ValueError(
                f"the network interface {name} has no IPv4 address: {error.strerror}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
