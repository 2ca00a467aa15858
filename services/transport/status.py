"""How an error looks on the wire."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc

RETRY_PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata with the time after which a gRPC client may try again (gRFC A6)."""

MAX_MESSAGE_CHARACTERS = 500
"""Longest message of an error. gRPC drops a call whose trailers are over 8 KiB, and characters
beyond ASCII take up to twelve bytes there."""


def shortened(message: str) -> str:
    """Returns a message that may repeat a caller's text, cut to a length that fits."""
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    return message[: MAX_MESSAGE_CHARACTERS - 3] + "..."


@dataclass(frozen=True, slots=True)
class Status:
    """A gRPC status that a caller may see; a message that is too long is cut."""

    code: grpc.StatusCode
    message: str
    retry_after_ms: int | None = None

    def __post_init__(self) -> None:
        """Cuts the message."""
        object.__setattr__(self, "message", shortened(self.message))

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that goes with the status."""
        if self.retry_after_ms is None:
            return ()
        return ((RETRY_PUSHBACK, str(self.retry_after_ms)),)


class RefusedCallError(Exception):
    """A call that is refused for how it was made, whatever the service; it carries its status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.message)
        self.status = status


StatusMapper = Callable[[BaseException], Status | None]
"""Finds the status of an error that callers may know; None for one that they may not."""
