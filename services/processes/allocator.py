"""The C library's allocator in processes with many threads."""

import asyncio
import contextlib
import ctypes
import os
from pathlib import Path
from typing import NoReturn

_M_ARENA_MAX = -8  # glibc's malloc.h
_MAX_ARENAS = 2
_RETURN_S = 3.0
_GROWTH_BYTES = 16 * 2**20
"""Growth of the process from which on free memory is returned. That takes 0.2 ms, or 1 ms for each
MiB that is free."""


def release_free_memory() -> None:
    """Returns memory that nothing uses to the system; with another C library, does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def share_arenas() -> None:
    """Lets all threads share two arenas of glibc's malloc; with another C library, does nothing.

    The default is eight for each core. A thread cannot use the memory that is free in another
    thread's arena, and gRPC starts threads under load, so memory would grow with each flood.
    Call it before the first thread starts.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MAX_ARENAS)


async def return_free_memory() -> NoReturn:
    """Releases free memory every few seconds while the process is larger than now, until cancelled.

    Between pieces that are in use, glibc keeps what is free: after a flood, hundreds of MiB.
    """
    first_bytes = _resident_bytes()
    while True:
        await asyncio.sleep(_RETURN_S)
        if _resident_bytes() > first_bytes + _GROWTH_BYTES:
            await asyncio.to_thread(release_free_memory)


def _resident_bytes() -> int:
    """Returns the memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
