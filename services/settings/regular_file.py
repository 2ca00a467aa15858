"""Reads files that an operator names and may replace at any time, and looks at who else may."""

import errno
import os
import stat
from pathlib import Path


def read_regular_file(path: Path, *, max_bytes: int) -> bytes:
    """Returns the content of a regular file.

    A FIFO would wait for its writer and a device may have no end; neither is opened.

    Raises:
        OSError: it is something else, larger than `max_bytes`, or cannot be read.
    """
    _check_is_regular(path.stat(), path)
    # It may have been replaced in between; opening a FIFO without waiting does not wait.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        _check_is_regular(found, path)
        # A file may grow while it is read.
        content = file.read(max_bytes + 1) if found.st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is over the limit of {max_bytes} bytes", str(path))
    return content


def describe_exposure(path: Path) -> str:
    """Returns what users besides the owner may do with a secret file; empty if nothing.

    The owner's group may read it: that is how files are handed to services that are not root.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    found = []
    if mode & stat.S_IROTH:
        found.append("every user may read it")
    if mode & stat.S_IWOTH:
        found.append("every user may write it")
    elif mode & stat.S_IWGRP:
        found.append("its group may write it")
    if not found:
        return ""
    return f"{' and '.join(found)} (permissions {stat.S_IMODE(mode):04o}); 0600 or 0640 is enough"


def _check_is_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
