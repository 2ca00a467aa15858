"""The response object that bodies and events carry."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from services.frontend.engine_client.messages import Usage
from services.frontend.http.responses.calls import ResponsesCall
from services.frontend.pipeline.served_model import ServedModel

CUT_OFF = {"reason": "max_output_tokens"}
_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Values of sampling fields that neither the request nor the model has."""


class ResponseObject:
    """Describes one response at each stage of its life."""

    def __init__(self, model: ServedModel, call: ResponsesCall, *, is_stored: bool) -> None:
        """Starts the response's clock."""
        self.id = f"resp_{uuid.uuid4().hex}"
        """Its id; the request's own one may be the client's."""
        defaults = model.info.default_sampling
        sampling = {
            name: getattr(defaults, name) if defaults.HasField(name) else value
            for name, value in _DEFAULTS.items()
        }
        given = {name: call.settings[name] for name in sampling}
        self._sampling = sampling | {k: v for k, v in given.items() if v is not None}
        self._settings = call.settings
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
        }
        self._model = model.info.model
        self._is_stored = is_stored

    def body(
        self,
        status: str,
        *,
        output: Sequence[Any] = (),
        usage: dict[str, Any] | None = None,
        incomplete_details: dict[str, str] | None = None,
        error: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Returns the response with a status; a completed one has the time of its end."""
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": incomplete_details,
            "model": self._model,
            **self._settings,
            **self._sampling,
            "store": self._is_stored,
            "output": list(output),
            "usage": usage,
        }


def usage_body(usage: Usage) -> dict[str, Any]:
    """Returns the usage in tokens."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
