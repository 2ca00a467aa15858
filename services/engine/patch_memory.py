"""Memory for the patches of images, which the engine service shares with the workers of its host.

A step names the place of an image's patches instead of carrying them: a message of 3 MB was copied
some fifteen times between the service and a worker, once for each rank.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Self

from services.processes.sealed_memory import sealed_memory

WARM_BYTES = 2**26
"""The first bytes, whose pages stay when their images are gone: new ones must be zeroed first."""


class PatchMemory:
    """A file in memory without a name; the lowest free part of it is taken first.

    Only the service takes and frees parts; workers read, and cannot change its size. Images that
    a collection of garbage finds are freed by any thread, in the middle of `put` too.
    """

    def __init__(self, fd: int) -> None:
        """Maps a file that another process has made, and closes its descriptor."""
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self.num_bytes = os.fstat(fd).st_size
        self._pages = mmap.mmap(fd, self.num_bytes)
        self._ends: dict[int, int] = {}
        """Where each place that is taken ends, by its begin."""

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """Makes memory of which only pages that were written take room; num_bytes is positive."""
        return cls(sealed_memory("octavo-patches", num_bytes))

    @property
    def fd(self) -> int:
        """The file, for workers to inherit."""
        return self._fd

    def put(self, parts: Sequence[bytes]) -> int | None:
        """Writes parts one after the other; returns where they begin, None if there is no room."""
        num_bytes = sum(map(len, parts))
        begin = 0
        # Of a copy, which stays as it is while others are freed.
        for taken, end in sorted(self._ends.copy().items()):
            if begin + num_bytes <= taken:
                break
            begin = _rounded(end)
        if not num_bytes or begin + num_bytes > self.num_bytes:
            return None
        self._ends[begin] = begin + num_bytes
        position = begin
        for part in parts:
            self._pages[position : position + len(part)] = part
            position += len(part)
        return begin

    def free(self, begin: int) -> None:
        """Frees a place, which no step in flight may name."""
        end, first = self._ends[begin], max(begin, WARM_BYTES)
        if first < end:
            self._pages.madvise(mmap.MADV_REMOVE, first, _rounded(end) - first)
        del self._ends[begin]  # last, as a thread may take it at once

    def read(self, begin: int, num_bytes: int) -> memoryview:
        """Returns what a place holds, without a copy.

        Raises:
            ValueError: there is no such place.
        """
        if begin < 0 or begin + num_bytes > self.num_bytes:
            raise ValueError(f"bytes {begin} to {begin + num_bytes} of {self.num_bytes}")
        return memoryview(self._pages)[begin : begin + num_bytes]


def _rounded(end: int) -> int:
    """Rounds up to whole pages."""
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
