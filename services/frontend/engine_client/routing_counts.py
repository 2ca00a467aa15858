"""Counts of what engines were sent, over all sessions."""

from dataclasses import dataclass


@dataclass(slots=True)
class RoutingCounts:
    """Counts of requests whose engine did not serve them as it should, and of image bytes."""

    num_retries: int = 0
    """Requests without output sent to another engine."""
    num_migrations: int = 0
    """Requests with output continued by another engine."""
    num_overruns: int = 0
    """Requests of which an engine sent more tokens than they may have."""
    num_image_bytes: int = 0
    """Bytes of patches sent to engines."""
