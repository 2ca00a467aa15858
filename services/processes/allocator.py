"""The C library's allocator in processes with many threads."""

import contextlib
import ctypes

_M_ARENA_MAX = -8  # glibc's malloc.h
_MAX_ARENAS = 2


def share_arenas() -> None:
    """Lets all threads share two arenas of glibc's malloc; with another C library, does nothing.

    The default is eight for each core. A thread cannot use the memory that is free in another
    thread's arena, and gRPC starts threads under load, so memory would grow with each flood.
    Call it before the first thread starts.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MAX_ARENAS)
