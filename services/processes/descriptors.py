"""Limits of the file descriptors that a process may have open."""

import contextlib
import resource

MIN_DESCRIPTORS = 64
"""Fewest with which a service starts, answers and can say what it lacks."""


def raise_descriptor_limit() -> None:
    """Raises this process's limit of open descriptors to what the system allows it.

    The usual limit of 1024 protects programs that call select(). Connections of gRPC and HTTP
    together may be more.

    Raises:
        SystemExit: the system allows fewer than MIN_DESCRIPTORS; it has a message.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < MIN_DESCRIPTORS:
        raise SystemExit(
            f"octavo: the limit of open files (ulimit -Hn) is {most}; it must be at least"
            f" {MIN_DESCRIPTORS}, and should be above the connections to take"
        )
    with contextlib.suppress(OSError, ValueError):  # macOS takes no limit without an end
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
