"""What the frontend has done since it started."""

from collections import Counter
from dataclasses import dataclass, field

from services.telemetry.histogram import LATENCY_BOUNDS_S, Histogram


def _latency() -> Histogram:
    return Histogram(LATENCY_BOUNDS_S)


@dataclass(slots=True)
class RequestCounts:
    """Counts of requests, as they end, and of their times in seconds."""

    num_live: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests that were served, by finish reason: stop, length, aborted."""
    failed: Counter[str] = field(default_factory=Counter)
    """Requests that were refused or failed, by error; "cancelled" where the client went away."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tokenize: Histogram = field(default_factory=_latency)
    submit: Histogram = field(default_factory=_latency)
    """From a tokenized prompt to the engine's word that it takes the request."""
    time_to_first_token: Histogram = field(default_factory=_latency)
    inter_token_latency: Histogram = field(default_factory=_latency)
    e2e_request_latency: Histogram = field(default_factory=_latency)
