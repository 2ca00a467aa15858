"""Bounds of flags that have none of their own, and why a value or a command line is refused."""

from pydantic_core import ErrorDetails

MAX_INT32 = 2**31 - 1
"""Limit of tables with 32-bit indices, and of gRPC's options."""
MAX_WAIT_S = 1_000_000.0
"""More than 11 days; gRPC counts times in milliseconds of 32 bits."""

CLI_PREFIX = "error parsing CLI: "
"""Start of pydantic-settings' errors about arguments that are no flags or lack a value."""


class UsageError(Exception):
    """A command line cannot be run; the message is for the operator, one line a problem."""


def reason_of(problem: ErrorDetails) -> str:
    """Returns the reason why pydantic refuses a setting or a body, for operators and callers.

    pydantic's own name of errors that our validators raise is left out.
    """
    return problem["msg"].removeprefix("Value error, ")
