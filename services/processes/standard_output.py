"""Ends a command whose standard output fails as Unix tools do."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CLOSED_PIPE = 128 + signal.SIGPIPE
"""The status that a shell shows of a program that SIGPIPE ended."""

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def checked_output(program: str) -> Iterator[None]:
    """Writes out standard output at the end, and ends the process if that failed, then or before.

    A reader that went away ends it silently. Any other failure is one line on standard error.

    Args:
        program: begins that line.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None: it was closed before the start
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(CLOSED_PIPE) from None
    except OSError as error:
        if error.errno not in _WRITE_ERRORS:
            raise
        _discard_output()
        sys.stderr.write(f"{program}: cannot write the output: {error.strerror}\n")
        raise SystemExit(1) from None
    except SystemExit as ended:
        # Typer turns a closed pipe into a status of its own.
        if isinstance(ended.__context__, BrokenPipeError):
            _discard_output()
            raise SystemExit(CLOSED_PIPE) from None
        raise


def _discard_output() -> None:
    """Keeps the interpreter from failing once more, as it writes what is left in buffers.

    Source: https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
