"""The limit of the address space that a process may have (`ulimit -v`)."""

import resource

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
    limit = min(filter(_is_set, resource.getrlimit(resource.RLIMIT_AS)), default=MIN_BYTES)
    if limit < MIN_BYTES:
        raise SystemExit(
            f"{program}: the limit of the address space (ulimit -v) is {limit // 2**20} MiB; "
            f"it must be at least {MIN_BYTES // 2**20} MiB"
        )


def _is_set(limit: int) -> bool:
    return limit != resource.RLIM_INFINITY
