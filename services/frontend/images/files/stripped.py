"""A file without what decoding its pixels does not need."""

from dataclasses import dataclass

from services.frontend.errors import InvalidRequestError

UPRIGHT = 1
"""EXIF's orientation of a picture that is not turned."""


@dataclass(frozen=True, slots=True)
class Stripped:
    """A whole file of one picture: no metadata, no profiles, no later frames, nothing after it."""

    data: bytes
    orientation: int = UPRIGHT
    """EXIF's orientation, 1 to 8."""


def truncated(name: str) -> InvalidRequestError:
    """Returns the error for a file that ends early."""
    return InvalidRequestError(f"the {name} file is truncated")


def damaged(name: str, reason: str) -> InvalidRequestError:
    """Returns the error for a file with wrong contents."""
    return InvalidRequestError(f"the {name} file is damaged: {reason}")
