"""One log line per request, whatever becomes of it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from services.frontend.engine_client.messages import FinishReason
from services.frontend.errors import FrontendError
from services.frontend.pipeline.request import MAX_REQUEST_ID_CHARACTERS, Output

log = structlog.get_logger()


class RequestRecord:
    """Notes what a request's log line says."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._first_output_s: float | None = None
        self._last: Output | None = None

    def observe(self, output: Output) -> None:
        """Notes a piece of the request's output."""
        if self._first_output_s is None:
            self._first_output_s = time.monotonic()
        self._last = output

    def facts(self) -> dict[str, str | int | float]:
        """Returns what is known by now."""
        now_s = time.monotonic()
        facts: dict[str, str | int | float] = {"elapsed_ms": _ms(now_s - self._start_s)}
        if self._first_output_s is not None:
            facts["ttft_ms"] = _ms(self._first_output_s - self._start_s)
        last = self._last
        if last is not None and last.finish_reason is not None and last.usage is not None:
            name = FinishReason.Name(last.finish_reason)
            facts["finish_reason"] = name.removeprefix("FINISH_REASON_").lower()
            facts["prompt_tokens"] = last.usage.prompt_tokens
            facts["cached_tokens"] = last.usage.cached_tokens
            facts["output_tokens"] = last.usage.output_tokens
        return facts


@contextmanager
def request_logged(request_id: str, *, method: str) -> Iterator[RequestRecord]:
    """Logs how the request inside ended, with its id on every line that is logged meanwhile."""
    # One that is too long is refused further on, and must not fill the log.
    shown = request_id[:MAX_REQUEST_ID_CHARACTERS]
    with structlog.contextvars.bound_contextvars(request_id=shown):
        record = RequestRecord()
        try:
            yield record
        except FrontendError as error:
            log.info("request_failed", method=method, error=type(error).__name__, **record.facts())
            raise
        except (asyncio.CancelledError, GeneratorExit):
            log.info("request_cancelled", method=method, **record.facts())
            raise
        log.info("request_finished", method=method, **record.facts())


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
