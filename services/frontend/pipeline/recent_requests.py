"""Where the time of recent requests went at this frontend."""

from collections import OrderedDict
from dataclasses import dataclass, field

from services.frontend.engine_client.route import Route

MAX_REQUESTS = 4096
"""Requests remembered, about 4 MiB."""


@dataclass(slots=True, kw_only=True)
class RequestStory:
    """The progress of one request. Times are seconds of `time.monotonic()`; None: not yet."""

    method: str
    start_s: float
    tokenized_s: float | None = None
    admitted_s: float | None = None
    first_output_s: float | None = None
    end_s: float | None = None
    end: str = ""
    """The finish reason or the error's name; empty before the end."""
    routes: list[Route] = field(default_factory=list)
    """The way of each output."""


class RecentRequests:
    """The stories of the latest requests, live ones included."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        """Remembers nothing yet."""
        self._max_requests = max_requests
        self._stories: OrderedDict[str, RequestStory] = OrderedDict()

    def add(self, request_id: str, story: RequestStory) -> None:
        """Remembers a request by its name at the engines; the oldest one is forgotten."""
        self._stories.pop(request_id, None)
        self._stories[request_id] = story
        if len(self._stories) > self._max_requests:
            self._stories.popitem(last=False)

    def find(self, request_id: str) -> RequestStory | None:
        """Returns the story of a request, None if it is not remembered."""
        return self._stories.get(request_id)
