"""Memory that a service shares with one helper, for messages that would fill a pipe many times.

A helper may be taken over by what it reads. It cannot change the memory's size, which would end the
service, and the service copies an answer before it looks at it.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Self

from services.processes.sealed_memory import sealed_memory

LEAST_BYTES = 2**16
"""Shorter messages go through the pipe, which takes as many at once."""
_WARM_BYTES = 2**23
"""Bytes whose pages stay for the next message."""


class MessageMemory:
    """Holds one message at a time: a question, then its answer."""

    def __init__(self, fd: int) -> None:
        """Maps memory that the service has created, and owns its descriptor."""
        self.fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._num_bytes = os.fstat(fd).st_size
        self._pages = mmap.mmap(fd, self._num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """Makes memory of a positive size, of which only what was written takes room."""
        return cls(sealed_memory("octavo-messages", num_bytes))

    def takes(self, num_bytes: int) -> bool:
        """Whether a message of this length is to go through it."""
        return LEAST_BYTES <= num_bytes <= self._num_bytes

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Writes the parts of a message; each has one byte an element."""
        begin = 0
        for part in parts:
            self._pages[begin : begin + len(part)] = part
            begin += len(part)

    def read(self, num_bytes: int) -> bytes:
        """Returns a copy of a message that it takes, and gives much memory back to the system."""
        content = self._pages[:num_bytes]
        if num_bytes > _WARM_BYTES:
            rest = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE - _WARM_BYTES
            self._pages.madvise(mmap.MADV_REMOVE, _WARM_BYTES, rest)
        return content

    def close(self) -> None:
        """Gives the memory back; nothing takes or reads messages any more."""
        self._close_fd()
        self._pages.close()
