"""Records the end of every request: count, log line, latencies, spans and story."""

import time
from typing import TYPE_CHECKING

import structlog

from services.engine.core.recent_requests import RecentRequests, RequestStory
from services.engine.core.stats import Counters
from services.engine.errors import RequestFaultError
from services.engine.request import Request, RequestOutput, StepMark

if TYPE_CHECKING:
    from services.telemetry.spans import RequestSpan, Tracing

log = structlog.get_logger()


class RequestEnds:
    """Records the end of requests.

    Spans are made here, from the marks of a request, so tracing adds nothing to a step.
    """

    def __init__(self, counters: Counters, tracing: "Tracing | None") -> None:
        self.recent = RecentRequests(counters.recent_steps)
        """The stories of ended requests."""
        self._counters = counters
        self._tracing = tracing

    def record(self, output: RequestOutput) -> None:
        """Records a request's last output."""
        request, end_s = output.request, time.monotonic()
        reason = output.finish_reason.value if output.finish_reason else "failed"
        error = None if output.error is None else type(output.error).__name__
        self._counters.finished[reason] += 1
        self._counters.latencies.count_end(request, end_s)
        self.recent.add(RequestStory.of(request, end_s, error or reason))
        if isinstance(output.error, RequestFaultError):
            log.error(
                "request_was_to_blame",
                request_id=request.request_id,
                error_id=output.error.error_id,
                reason=output.error.reason,
            )
        log.info(
            "request_finished",
            request_id=request.request_id,
            finish_reason=reason,
            error=error,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.num_cached_tokens,
            output_tokens=request.num_output_tokens,
            queue_ms=_ms_until(request.started, request),
            ttft_ms=_ms_until(request.first_token, request),
            duration_ms=_ms(end_s - request.arrival_s),
        )
        if self._tracing is not None:
            span = self._tracing.start(
                "engine request",
                traceparent=request.traceparent,
                start_s=request.arrival_s,
                request_id=request.request_id,
            )
            _add_phases(span, request, end_s)
            span.end(
                end_s,
                error=error,
                finish_reason=reason,
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=request.num_cached_tokens,
                output_tokens=request.num_output_tokens,
                num_preemptions=request.num_preemptions,
                num_losses=request.num_losses,
            )


def _add_phases(span: "RequestSpan", request: Request, end_s: float) -> None:
    """Adds spans for the queue, the prefill and the decode, with the ids of their steps.

    WatchSteps and recordings use the same ids. Each worker counts its own steps, so spans of a
    request that several workers ran have no ids.
    """
    started, first, last = request.started, request.first_token, request.last_token
    span.add_phase("queued", request.arrival_s, end_s if started is None else started.at_s)
    if started is None:
        return
    if first is None or last is None:
        span.add_phase("prefill", started.at_s, end_s)
        return
    prefill: dict[str, int] = {}
    decode: dict[str, int] = {}
    if not request.num_losses:
        prefill = _steps(started.step_id, first.step_id)
        decode = _steps(first.step_id + 1, last.step_id)
    span.add_phase("prefill", started.at_s, first.at_s, **prefill)
    span.add_phase("decode", first.at_s, end_s, **decode)


def _steps(first: int, last: int) -> dict[str, int]:
    return {"first_step": first, "last_step": last, "num_steps": last - first + 1}


def _ms_until(mark: StepMark | None, request: Request) -> float | None:
    return None if mark is None else _ms(mark.at_s - request.arrival_s)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
