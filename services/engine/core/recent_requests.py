"""Where the time of recent requests went."""

from collections import OrderedDict
from dataclasses import dataclass

from services.engine.core.recent_steps import Gap, RecentSteps
from services.engine.request import Request, StepMark
from services.engine.request_times import Stage

MAX_REQUESTS = 4096
"""Ended requests remembered, about 4 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStory:
    """One request so far. Times are seconds of `time.monotonic()`."""

    request_id: str
    arrival_s: float
    now_s: float
    """When this was taken: the end of an ended request."""
    seconds: dict[Stage, float]
    """Seconds of each stage, in the order in which they first came."""
    stage: Stage | None
    """The present stage; None after the end."""
    end: str
    """The finish reason or the error's name; empty before the end."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_resumed_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_losses: int
    started: StepMark | None
    first_token: StepMark | None
    last_token: StepMark | None

    @classmethod
    def of(cls, request: Request, now_s: float, end: str = "") -> "RequestStory":
        """Takes the story of a request, which ends at `now_s` if `end` says how."""
        return cls(
            request_id=request.request_id,
            arrival_s=request.arrival_s,
            now_s=now_s,
            seconds=request.times.seconds(now_s),
            stage=None if end else request.times.stage,
            end=end,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            num_resumed_tokens=len(request.resumed_token_ids),
            num_preemptions=request.num_preemptions,
            num_recomputed_tokens=request.times.num_recomputed_tokens,
            num_losses=request.num_losses,
            started=request.started,
            first_token=request.first_token,
            last_token=request.last_token,
        )


class RecentRequests:
    """A ring of the stories of ended requests, and the steps that ran them."""

    def __init__(self, steps: RecentSteps, max_requests: int = MAX_REQUESTS) -> None:
        """Remembers no request yet; `steps` are those of all requests."""
        self._steps = steps
        self._max_requests = max_requests
        self._stories: OrderedDict[str, RequestStory] = OrderedDict()

    def add(self, story: RequestStory) -> None:
        """Remembers an ended request; one with the same id is forgotten, or the oldest one."""
        self._stories.pop(story.request_id, None)
        self._stories[story.request_id] = story
        if len(self._stories) > self._max_requests:
            self._stories.popitem(last=False)

    def find(self, request_id: str) -> RequestStory | None:
        """Returns the story of an ended request, None if it is not remembered."""
        return self._stories.get(request_id)

    def longest_gap(self, story: RequestStory) -> Gap | None:
        """Returns the longest time between two steps while a request had output."""
        if story.first_token is None or story.last_token is None:
            return None
        return self._steps.longest_gap(story.first_token.at_s, story.last_token.at_s)
