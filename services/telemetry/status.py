"""How an error looks on the wire."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc

RETRY_PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata that tells a gRPC client when to try again (gRFC A6)."""


@dataclass(frozen=True, slots=True)
class Status:
    """A gRPC status that a caller may see."""

    code: grpc.StatusCode
    message: str
    retry_after_ms: int | None = None

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that goes with the status."""
        if self.retry_after_ms is None:
            return ()
        return ((RETRY_PUSHBACK, str(self.retry_after_ms)),)


StatusMapper = Callable[[BaseException], Status | None]
"""Finds the status of an error that callers may know; None for one that they may not."""
