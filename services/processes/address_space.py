"""The limit of the address space that a process may have (`ulimit -v`)."""

import os
import resource
from pathlib import Path

MIN_BYTES = 2 * 2**30
"""Address space with which a service starts and holds what its own limits allow.

Its libraries take 0.4 GiB, the engine's worker 1.3 GiB, and each core some more. With too little,
gRPC aborts, or waits for ever for a thread that it could not start.
"""


def require_address_space(program: str) -> None:
    """Checks this process's limit; call it before imports that need the space.

    Args:
        program: what the operator started, such as "octavo frontend".

    Raises:
        SystemExit: the limit is below MIN_BYTES; it has a message.
    """
    limit = _limit()
    if limit is not None and limit < MIN_BYTES:
        raise SystemExit(
            f"{program}: the limit of the address space (ulimit -v) is {limit // 2**20} MiB; "
            f"it must be at least {MIN_BYTES // 2**20} MiB"
        )


def address_space_left() -> int | None:
    """Returns the bytes that this process may still map; None if there is no limit."""
    limit = _limit()
    if limit is None:
        return None
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(0, limit - num_pages * os.sysconf("SC_PAGE_SIZE"))


def _limit() -> int | None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    return min((each for each in limits if each != resource.RLIM_INFINITY), default=None)
