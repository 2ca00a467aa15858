"""The engines that a request went to, and how long its output lay unread."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Visit:
    """One engine that got the request."""

    target: str
    """The engine's address."""
    left_because: str = ""
    """Why the request went on to another engine; empty if it did not."""


@dataclass(slots=True)
class Route:
    """The way of one output of a request."""

    request_id: str
    """The request's name at the engines."""
    visits: list[Visit] = field(default_factory=list)
    """The engines, in order."""
    unread_s: float = 0.0
    """Seconds for which tokens had come that were not read."""
