"""Limits of the file descriptors that a process may have open."""

import contextlib
import resource


def raise_descriptor_limit() -> None:
    """Raises this process's limit of open descriptors to what the system allows it.

    The usual limit of 1024 protects programs that call select(). Connections of gRPC and HTTP
    together may be more.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS takes no limit without an end
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
