"""Standard error that never holds up the process: what its reader does not take is dropped.

A pipe without a reader is full after 64 KiB, a terminal stops at Ctrl-S, a disk fills up. A writer
writes then waits, and with the event loop every stream of a service.
"""

import atexit
import contextlib
import io
import os
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

MAX_PENDING_BYTES = 2**20
"""Lines that wait for the reader; more are dropped."""
EXIT_TIMEOUT_S = 1.0
"""Longest time that the end of the process waits for the reader."""
_STDERR_FD = 2
_MAX_PARTIAL_CHARS = 2**16
_ATOMIC_BYTES = select.PIPE_BUF
"""A pipe takes this many bytes at once, without those of another process between them."""


class LossyStream(io.TextIOBase):
    """A text stream on a descriptor, whose `write` returns at once.

    Lines are written as a whole, by a thread where the descriptor may block. Lines that do not fit
    are dropped and counted.
    """

    def __init__(self, fd: int, *, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        """Writes to `fd`, which it never closes."""
        self.num_dropped_lines = 0
        self.describe_drop: Callable[[int], str] = "{} log lines were dropped".format
        """Returns a line that says how many were dropped. It is written when others are again."""
        self._fd = fd
        # A file takes lines at once; a full disk refuses them.
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._never_blocks = is_file or not os.get_blocking(fd)
        self._max_pending_bytes = max_pending_bytes
        self._partial = ""
        self._pending: deque[bytes] = deque()
        self._num_pending_bytes = 0
        self._num_unreported = 0
        # A destructor may write a warning while this thread writes a line.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]  # not to be set here
        """Says UTF-8; some libraries ask before they write."""
        return "utf-8"

    def fileno(self) -> int:
        """Returns the descriptor, for C code that writes by itself."""
        return self._fd

    def isatty(self) -> bool:
        """Returns whether a person reads it."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, text: str) -> int:
        """Takes text, and writes the lines that it completes."""
        with self._changed:
            lines, newline, self._partial = (self._partial + text).rpartition("\n")
            if len(self._partial) > _MAX_PARTIAL_CHARS:
                lines, newline, self._partial = self._partial, "\n", ""
            if newline and self._put(_encode(lines + newline)):
                self._report()
        return len(text)

    def finish(self, timeout_s: float) -> None:
        """Waits until all lines are written, but not longer than `timeout_s`."""
        with self._changed:
            if self._partial:
                self.write("\n")
            self._changed.wait_for(lambda: not self._num_pending_bytes, timeout_s)

    def follow_forks(self) -> None:
        """Lets forked processes write too, without the lines that still wait here."""
        os.register_at_fork(
            before=lambda: self._changed.acquire(),
            after_in_parent=lambda: self._changed.release(),
            after_in_child=self._start_over,
        )

    def _start_over(self) -> None:
        self._pending.clear()
        self._num_pending_bytes = self._num_unreported = 0
        self._changed = threading.Condition(threading.RLock())
        self._thread = None

    def _put(self, lines: bytes) -> bool:
        """Writes lines or lets them wait; returns whether they are written."""
        if self._never_blocks and not self._num_pending_bytes:
            try:
                rest = lines[os.write(self._fd, lines) :]
            except BlockingIOError:
                rest = lines
            except OSError:  # no reader, no room on the disk
                self._drop(lines)
                return False
            if not rest:
                return True
            lines = rest
        if self._num_pending_bytes + len(lines) <= self._max_pending_bytes and self._has_thread():
            self._pending.append(lines)
            self._num_pending_bytes += len(lines)
            self._changed.notify_all()
        else:
            self._drop(lines)
        return False

    def _has_thread(self) -> bool:
        """Returns whether a thread writes what waits, and starts one if necessary."""
        if self._thread is None:
            thread = threading.Thread(target=self._write_pending, name="stderr", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no threads now, or the interpreter ends
                return False
            self._thread = thread
        return True

    def _drop(self, lines: bytes) -> None:
        num_lines = lines.count(b"\n")
        self.num_dropped_lines += num_lines
        self._num_unreported += num_lines

    def _write_pending(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                batch = self._take_batch()
            is_written = self._write_all(batch)
            with self._changed:
                self._num_pending_bytes -= len(batch)
                if is_written:
                    self._report()
                else:
                    self._drop(batch)
                self._changed.notify_all()

    def _take_batch(self) -> bytes:
        batch = self._pending.popleft()
        while self._pending and len(batch) + len(self._pending[0]) <= _ATOMIC_BYTES:
            batch += self._pending.popleft()
        return batch

    def _write_all(self, batch: bytes) -> bool:
        """Writes a batch, however long that takes; returns whether the descriptor took it."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while batch:
            try:
                batch = batch[os.write(self._fd, batch) :]
            except BlockingIOError:
                poll.poll()
            except OSError:  # no reader, no room on the disk
                return False
        return True

    def _report(self) -> None:
        """Says how many lines were dropped, once there is room for that again."""
        if self._num_unreported and self._num_pending_bytes <= self._max_pending_bytes // 2:
            num_dropped, self._num_unreported = self._num_unreported, 0
            self._put(_encode(self.describe_drop(num_dropped) + "\n"))


def replace_standard_error() -> None:
    """Makes `sys.stderr` a LossyStream, and its descriptor non-blocking where that is possible.

    C code and children, which write to the descriptor by themselves, then lose lines instead of
    waiting. Neither is possible for a socket; there only Python's lines never wait.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR_FD:
        # It was closed at the start: the next socket would become standard error.
        os.set_inheritable(fd, True)
    os.close(fd)
    if (own := _open_non_blocking()) is not None:
        os.dup2(own, _STDERR_FD)
        os.close(own)
    stream = LossyStream(_STDERR_FD)
    stream.follow_forks()
    atexit.register(stream.finish, EXIT_TIMEOUT_S)
    sys.stderr = stream


@contextlib.contextmanager
def standard_error_for_child() -> Iterator[int | None]:
    """Returns a descriptor for a child's standard error; None lets it inherit ours.

    uvloop makes what a child inherits blocking, and with it ours, unless it was opened again.
    """
    fd = _open_non_blocking()
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def num_dropped_lines() -> int:
    """Returns how many lines this process could not write to standard error."""
    return sys.stderr.num_dropped_lines if isinstance(sys.stderr, LossyStream) else 0


def _open_non_blocking() -> int | None:
    """Opens standard error again, without blocking; None where it cannot be or need not be.

    The flag belongs to what was opened, which the shell and its other programs share. A file would
    be written from its beginning, and never blocks for long.
    """
    mode = os.fstat(_STDERR_FD).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        return None
    try:
        return os.open(f"/proc/self/fd/{_STDERR_FD}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # not Linux, or another user's
        return None


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")
