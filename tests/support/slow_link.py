"""A second host on this machine: a network namespace, and a link to it that delays and can be cut.

The link is a pair of TUN interfaces whose packets a thread passes on, so that it needs neither
netem nor a bridge. It takes Linux, root, iproute2 and /dev/net/tun.
"""

import contextlib
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET_BYTES = 2**16
_NETWORK = "198.18"  # RFC 2544: for tests of networks


def obstacle() -> str:
    """Returns why there can be no second host here; empty if there can."""
    if os.geteuid():
        return "it takes root"
    if not shutil.which("ip") or not Path("/dev/net/tun").exists():
        return "it takes iproute2 and /dev/net/tun"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "network namespaces are not permitted"


class SlowLink:
    """The link between this host and a second one."""

    def __init__(self, delay_s: float) -> None:
        """Makes the second host, and the link between the two.

        Args:
            delay_s: time that each packet takes, in either direction.
        """
        number = os.getpid() % 2**16
        subnet = f"{_NETWORK}.{number >> 8}"
        first = (number & 0xFC) or 4
        self.interface = f"oct{number}a"
        """The link's interface on this host."""
        self.other_interface = f"oct{number}b"
        """On the other host."""
        self.address = f"{subnet}.{first + 1}"
        """This host's address on the link."""
        self.other_address = f"{subnet}.{first + 2}"
        """The other host's."""
        self.prefix: Sequence[str] = ("ip", "netns", "exec", f"octavo{number}")
        """Runs a command on the other host."""
        self.is_cut = False
        """Whether packets are lost, all of them, without a word to either side."""
        self._delay_s = delay_s
        self._namespace = f"octavo{number}"
        self._fds = (_open_tun(self.interface), _open_tun(self.other_interface))
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._pass_packets, name="slow-link", daemon=True)
        _ip("netns", "add", self._namespace)
        _ip("link", "set", self.other_interface, "netns", self._namespace)
        _ip("addr", "add", f"{self.address}/30", "dev", self.interface)
        _ip("link", "set", self.interface, "up")
        there = ("-n", self._namespace)
        _ip(*there, "addr", "add", f"{self.other_address}/30", "dev", self.other_interface)
        _ip(*there, "link", "set", self.other_interface, "up")
        _ip(*there, "link", "set", "lo", "up")
        self._thread.start()

    def close(self) -> None:
        """Takes the link and the second host down."""
        self._has_ended.set()
        self._thread.join()
        for fd in self._fds:
            os.close(fd)
        _ip("netns", "del", self._namespace)

    def _pass_packets(self) -> None:
        waiting: deque[tuple[float, int, bytes]] = deque()
        to = dict(zip(self._fds, reversed(self._fds), strict=True))
        while not self._has_ended.is_set():
            pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for fd in select.select(self._fds, (), (), pause_s)[0]:
                packet = os.read(fd, _MAX_PACKET_BYTES)
                if not self.is_cut:
                    waiting.append((time.monotonic() + self._delay_s, to[fd], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, fd, packet = waiting.popleft()
                with contextlib.suppress(OSError):  # its interface is not up yet
                    os.write(fd, packet)


@contextlib.contextmanager
def slow_link(delay_s: float) -> Iterator[SlowLink]:
    """Has a second host meanwhile."""
    link = SlowLink(delay_s)
    try:
        yield link
    finally:
        link.close()


def _open_tun(name: str) -> int:
    """Makes a TUN interface, which is gone when the descriptor is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
