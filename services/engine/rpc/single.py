"""One Generate message of the engine's own protocol, as a call of the engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protos.engine.v1.engine_pb2 import GenerateRequest, GenerateResponse
from services.engine.edge.call import CallOutput
from services.engine.edge.output import (
    FINISH_REASONS,
    logprobs_to_proto,
    prompt_logprobs_to_proto,
    usage_of,
)
from services.engine.edge.stop_strings import StopStrings
from services.engine.errors import EngineError
from services.engine.request import FinishReason, Request, RequestOutput


class _SingleOutput(CallOutput[FinishReason]):
    """Merges unread output into one message, whose size the context length bounds."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._response = GenerateResponse()

    def responses(self) -> list[GenerateResponse]:
        """Returns the messages to write now."""
        self.is_told = self.is_over
        response, self._response = self._response, GenerateResponse()
        if response.token_ids or response.finish_reason or response.prompt_logprobs:
            return [response]
        return []

    def _add(self, token_ids: Sequence[int], output: RequestOutput) -> None:
        response = self._response
        response.token_ids.extend(token_ids)
        if output.logprobs:
            response.logprobs.extend(map(logprobs_to_proto, token_ids, output.logprobs))
        if output.prompt_logprobs:
            response.prompt_logprobs.extend(prompt_logprobs_to_proto(output))

    def _stopped(self, text: str) -> FinishReason:
        del text
        return FinishReason.STOP

    def _ended(self, reason: FinishReason, stop_token_id: int | None) -> FinishReason:
        self._response.finish_reason = FINISH_REASONS[reason]
        if stop_token_id is not None:
            self._response.stop_token_id = stop_token_id
        self._response.usage.CopyFrom(usage_of(self.request))
        return reason


@dataclass(frozen=True, slots=True)
class SingleMessage:
    """One request with one output; see `CallMessage`."""

    message: GenerateRequest
    stop_rule = None

    def samples(self, *, max_model_len: int) -> Iterator[GenerateRequest]:
        """Yields the request, whose lengths are checked as it is read."""
        del max_model_len
        yield self.message

    def output(self, request: Request, stop_strings: StopStrings | None) -> _SingleOutput:
        """Returns the collector of the output."""
        del stop_strings
        return _SingleOutput(request)

    def failure(self, error: EngineError) -> None:
        """Returns None: failures are statuses here."""
        del error
