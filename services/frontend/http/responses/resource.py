"""The response object that bodies and events carry."""

import time
import uuid
from collections.abc import Sequence

from services.frontend.engine_client.messages import Usage
from services.frontend.http.answers.weights import weights_of
from services.frontend.http.responses.answer_schema import (
    OutputItem,
    Response,
    ResponseCut,
    ResponseProblem,
    ResponseStatus,
    ResponseUsage,
    Sampling,
)
from services.frontend.http.responses.calls import ResponsesCall
from services.frontend.pipeline.served_model import ServedModel

_CUT_OFF: ResponseCut = {"reason": "max_output_tokens"}


class ResponseObject:
    """Describes one response at each stage of its life."""

    def __init__(self, model: ServedModel, call: ResponsesCall, *, is_stored: bool) -> None:
        """Starts the response's clock."""
        self.id = f"resp_{uuid.uuid4().hex}"
        """Its id; the request's own one may be the client's."""
        self._created_s = int(time.time())
        self._model = model.name
        self._settings = call.settings
        self._sampling = _sampling_of(model, call)
        self._is_stored = is_stored

    def body(
        self,
        status: ResponseStatus,
        *,
        output: Sequence[OutputItem] = (),
        usage: ResponseUsage | None = None,
        error: ResponseProblem | None = None,
    ) -> Response:
        """Returns the response with a status; a completed one has the time of its end."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": _CUT_OFF if status == "incomplete" else None,
            "model": self._model,
            **self._settings,
            **self._sampling,
            "store": self._is_stored,
            "output": list(output),
            "usage": usage,
        }


def _sampling_of(model: ServedModel, call: ResponsesCall) -> Sampling:
    """Returns the values of sampling: the request's, or the model's, or else a default."""
    defaults = model.info.default_sampling

    def value_of(name: str, usual: float) -> float:
        given = call.sampling[name]
        if given is not None:
            return given
        value: float = getattr(defaults, name) if defaults.HasField(name) else usual
        return value

    return {
        "temperature": value_of("temperature", 1.0),
        "top_p": value_of("top_p", 1.0),
        "presence_penalty": value_of("presence_penalty", 0.0),
        "frequency_penalty": value_of("frequency_penalty", 0.0),
    }


def usage_body(usage: Usage) -> ResponseUsage:
    """Returns the usage in tokens."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        **weights_of(usage),
    }
