"""Records every request: a log line, counts and a span."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import structlog

from services.frontend.engine_client.messages import FinishReason
from services.frontend.errors import FrontendError, InvalidRequestError
from services.frontend.pipeline.recent_requests import RecentRequests, RequestStory
from services.frontend.pipeline.request import MAX_REQUEST_ID_CHARACTERS, Output
from services.frontend.pipeline.request_counts import RequestCounts

if TYPE_CHECKING:
    from services.telemetry.spans import RequestSpan, Tracing

log = structlog.get_logger()

CANCELLED = "cancelled"


class RequestRecord:
    """Records the progress of one request."""

    def __init__(
        self,
        counts: RequestCounts,
        story: RequestStory,
        *,
        span: "RequestSpan | None",
        traceparent: str,
    ) -> None:
        self.story = story
        """The progress so far."""
        self.traceparent = traceparent if span is None else span.traceparent
        """The parent span for the engine; may be empty."""
        self._counts = counts
        self._span = span
        self._last_output_s = 0.0
        self._last: Output | None = None

    def note_tokenized(self) -> None:
        """Notes that the prompt is encoded."""
        now_s = self.story.tokenized_s = time.monotonic()
        self._counts.tokenize.observe(now_s - self.story.start_s)

    def note_admitted(self) -> None:
        """Notes that the engine has admitted the request."""
        now_s = self.story.admitted_s = time.monotonic()
        if self.story.tokenized_s is not None:
            self._counts.submit.observe(now_s - self.story.tokenized_s)

    def observe(self, output: Output) -> None:
        """Notes new output."""
        now_s = time.monotonic()
        num_tokens = len(output.token_ids)
        if self.story.first_output_s is None:
            self.story.first_output_s = now_s
            self._counts.time_to_first_token.observe(now_s - self.story.start_s)
        elif num_tokens:
            gap_s = (now_s - self._last_output_s) / num_tokens
            self._counts.inter_token_latency.observe(gap_s, num_tokens)
        self._last_output_s = now_s
        self._last = output

    def end(self, error: str | None) -> dict[str, str | int | float]:
        """Counts and traces the end; returns facts for the log."""
        counts, story, end_s = self._counts, self.story, time.monotonic()
        facts: dict[str, str | int | float] = {"elapsed_ms": _ms(end_s - story.start_s)}
        if story.first_output_s is not None:
            facts["ttft_ms"] = _ms(story.first_output_s - story.start_s)
        last = self._last
        if last is not None and last.finish_reason is not None and last.usage is not None:
            name = FinishReason.Name(last.finish_reason)
            facts["finish_reason"] = name.removeprefix("FINISH_REASON_").lower()
            facts["prompt_tokens"] = last.usage.prompt_tokens
            facts["cached_tokens"] = last.usage.cached_tokens
            facts["output_tokens"] = last.usage.output_tokens
            counts.prompt_tokens += last.usage.prompt_tokens
            counts.cached_tokens += last.usage.cached_tokens
            counts.output_tokens += last.usage.output_tokens
        counts.e2e_request_latency.observe(end_s - story.start_s)
        story.end_s, story.end = end_s, error or str(facts.get("finish_reason", "answered"))
        if error is not None:
            counts.failed[error] += 1
        elif "finish_reason" in facts:
            counts.finished[str(facts["finish_reason"])] += 1
        if self._span is not None:
            self._add_phases(self._span, end_s)
            self._span.end(end_s, error=error, **facts)
        return facts

    def _add_phases(self, span: "RequestSpan", end_s: float) -> None:
        """Adds a span for each phase; the last one lasts to the end."""
        story = self.story
        begun = [("tokenize", story.start_s)]
        for name, start_s in (
            ("submit", story.tokenized_s),
            ("first token", story.admitted_s),
            ("stream", story.first_output_s),
        ):
            if start_s is not None:
                begun.append((name, start_s))
        for (name, start_s), (_, stop_s) in pairwise([*begun, ("", end_s)]):
            span.add_phase(name, start_s, stop_s)


class RequestLog:
    """Records all requests of the frontend."""

    def __init__(self, tracing: "Tracing | None" = None) -> None:
        """Makes spans only with `tracing`."""
        self.counts = RequestCounts()
        self.recent = RecentRequests()
        """The latest requests."""
        self._tracing = tracing

    def note_left_out(self, kinds: Sequence[str]) -> None:
        """Counts and logs the kinds of hosted tools that the model does not get."""
        self.counts.left_out.update(kinds)
        log.info("hosted_tools_left_out", kinds=sorted(kinds))

    @contextmanager
    def watch(
        self, request_id: str, *, method: str, traceparent: str = ""
    ) -> Iterator[RequestRecord]:
        """Records the request inside, and adds its id to every log line meanwhile."""
        # A longer id is refused later and must not fill the log.
        request_id = request_id[:MAX_REQUEST_ID_CHARACTERS]
        start_s, span = time.monotonic(), None
        if self._tracing is not None:
            span = self._tracing.start(
                "frontend request",
                traceparent=traceparent,
                start_s=start_s,
                request_id=request_id,
                method=method,
            )
        self.counts.num_live += 1
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            story = RequestStory(method=method, start_s=start_s)
            record = RequestRecord(self.counts, story, span=span, traceparent=traceparent)
            try:
                yield record
            except FrontendError as error:
                name, facts = type(error).__name__, {}
                if isinstance(error, InvalidRequestError) and error.field is not None:
                    # Logs hold nothing that a client wrote.
                    facts["field"] = error.field if error.is_field_ours else "(unknown)"
                log.info("request_failed", method=method, error=name, **facts, **record.end(name))
                raise
            except (asyncio.CancelledError, GeneratorExit):
                log.info("request_cancelled", method=method, **record.end(CANCELLED))
                raise
            except BaseException as error:
                record.end(type(error).__name__)  # logged where it becomes a status
                raise
            else:
                log.info("request_finished", method=method, **record.end(None))
            finally:
                self.counts.num_live -= 1


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
