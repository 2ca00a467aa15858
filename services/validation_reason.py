"""Reasons for which pydantic refuses a setting or a body, for operators and callers."""

from pydantic_core import ErrorDetails


def reason_of(problem: ErrorDetails) -> str:
    """Returns the reason without the name that pydantic gives errors of our validators."""
    return problem["msg"].removeprefix("Value error, ")
