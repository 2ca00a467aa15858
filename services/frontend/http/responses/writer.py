"""Writes responses of the Responses API."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.types import Send

from services.frontend.http.responses.output import Event
from services.frontend.http.wire.status import HttpError
from services.frontend.http.wire.writer import ResponseWriter

Body = Mapping[str, Any]


class ResponsesWriter(ResponseWriter):
    """One response, whose events have names and numbers and whose failure is an event."""

    names_events = True

    def __init__(self, send: Send, *, timeout_s: float, headers: Mapping[str, str]) -> None:
        """Counts events from 0."""
        super().__init__(send, timeout_s=timeout_s, headers=headers)
        self._num_events = 0
        self._failed: Callable[[dict[str, str]], Body] | None = None

    async def start_response(self, failed: Callable[[dict[str, str]], Body]) -> None:
        """Starts a stream of events; `failed` returns the response with an error."""
        await self.start_events()
        self._failed = failed

    async def write_numbered(self, events: Iterable[Event]) -> None:
        """Writes events together, with their numbers."""
        await self.write_events([self._numbered(event) for event in events])

    def error_body(self, told: HttpError) -> Body:
        """Returns an error as a body, or in a stream as the event of a failed response."""
        if self._failed is None:
            if told.param == "messages":  # the conversation's name in the pipeline
                told = dataclasses.replace(told, param="input")
            return super().error_body(told)
        code = "rate_limit_exceeded" if told.status == 429 else "server_error"
        response = self._failed({"code": code, "message": told.message})
        return self._numbered({"type": "response.failed", "response": response})

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}
