"""Counts of the frontend since its start."""

from collections import Counter
from dataclasses import dataclass, field

from services.telemetry.histogram import LATENCY_BOUNDS_S, Histogram

HOSTED_KINDS = (
    "web_search",
    "web_fetch",
    "code_execution",
    "code_interpreter",
    "tool_search",
    "file_search",
    "image_generation",
    "mcp",
    "advisor",
    "apply_patch",
    "computer",
    "local_shell",
    "programmatic_tool_calling",
    "shell",
)
"""Kinds of tools that vendors run or define themselves, without the dates of their versions."""


NO_VISION, TOO_MANY_IMAGES, UNPLACED = "no_vision", "too_many", "unplaced"
UNREAD, UNFETCHED = "unread", "unfetched"
IMAGE_REFUSALS = (NO_VISION, TOO_MANY_IMAGES, UNPLACED, UNREAD, UNFETCHED)
"""Why images are refused: the model sees none, the request has too many, the prompt does not name
them, their files cannot be read or fetched."""


def _latency() -> Histogram:
    return Histogram(LATENCY_BOUNDS_S)


@dataclass(slots=True)
class ImageCounts:
    """Counts of images, and the seconds that their reading took."""

    num_read: int = 0
    num_cached: int = 0
    """Images that were read lately, and not again."""
    refused: Counter[str] = field(default_factory=Counter)
    """Counts by reason; see IMAGE_REFUSALS."""
    read: Histogram = field(default_factory=_latency)


@dataclass(slots=True)
class RequestCounts:
    """Counts and latencies in seconds of ended requests."""

    num_live: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Served requests by finish reason: stop, length, aborted."""
    failed: Counter[str] = field(default_factory=Counter)
    """Refused or failed requests by error; "cancelled" if the client left."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Hosted tools that models did not get, by kind."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tokenize: Histogram = field(default_factory=_latency)
    submit: Histogram = field(default_factory=_latency)
    """From an encoded prompt to its admission by the engine."""
    time_to_first_token: Histogram = field(default_factory=_latency)
    inter_token_latency: Histogram = field(default_factory=_latency)
    e2e_request_latency: Histogram = field(default_factory=_latency)
    images: ImageCounts = field(default_factory=ImageCounts)
