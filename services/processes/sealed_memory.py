"""Memory that several processes map, whose size none of them can change."""

import fcntl
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memory(name: str, num_bytes: int) -> int:
    """Returns the descriptor of a new file in memory, of which only what was written takes room.

    name: what /proc shows. num_bytes: is positive.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
