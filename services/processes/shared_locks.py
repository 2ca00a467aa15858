"""Locks among processes that end with the process that holds them."""

import contextlib
import fcntl
import os
import tempfile
import weakref
from collections.abc import Iterator


class SharedLocks:
    """Numbered locks, made before the processes that share them are forked.

    The kernel keeps them, as locks of single bytes of a file without a name, and frees the locks of
    a process that dies. They exclude processes, not the threads of one.
    """

    def __init__(self) -> None:
        """Makes the file; its locks take no room in it."""
        with tempfile.TemporaryFile() as file:
            self._fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._fd)

    @contextlib.contextmanager
    def hold(self, number: int) -> Iterator[None]:
        """Holds one lock; waits while another process does."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)
