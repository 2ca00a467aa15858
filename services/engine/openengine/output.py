"""One output of a call, until it is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protos.common.v1.sampling_pb2 import PositionLogprobs
from protos.openengine.v1 import openengine_pb2
from protos.openengine.v1.openengine_pb2 import (
    GenerateResponse,
    GenerationFinished,
    LogProb,
    PromptOutput,
    StopMatch,
    TokenInfo,
    TokenOutput,
    Usage,
)
from services.engine.edge.call import CallOutput
from services.engine.edge.output import logprobs_to_proto, prompt_logprobs_to_proto
from services.engine.edge.stop_strings import StopStrings
from services.engine.request import FinishReason, Request, RequestOutput

FINISH_REASONS = {
    FinishReason.STOP: openengine_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: openengine_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: openengine_pb2.FINISH_REASON_CANCELLED,
}


@dataclass(slots=True)
class CallTotals:
    """Figures of all outputs of a call together."""

    request_id: str
    num_open: int = 0
    num_output_tokens: int = 0

    def usage(self, request: Request) -> Usage:
        """Returns the usage of the call, of which `request` is one output."""
        return Usage(
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=request.num_prompt_tokens + self.num_output_tokens,
            cached_prompt_tokens=request.num_cached_tokens,
        )


class OpenEngineOutput(CallOutput[GenerationFinished]):
    """Collects the output of one request, in chunks of new tokens."""

    def __init__(
        self,
        request: Request,
        totals: CallTotals,
        *,
        own_stop_token_ids: frozenset[int],
        stop_strings: StopStrings | None,
    ) -> None:
        super().__init__(request, own_stop_token_ids, stop_strings)
        self._totals = totals
        self._prompt: list[TokenInfo] = []
        self._tokens: list[TokenInfo] = []
        totals.num_open += 1

    def responses(self) -> list[GenerateResponse]:
        """Returns the messages to write now."""
        told = []
        if self._prompt and (self._tokens or self._ending is not None):  # it is complete by now
            told.append(self._response(prompt=PromptOutput(tokens=self._prompt)))
            self._prompt = []
        if self._tokens:
            tokens = TokenOutput(output_index=self.request.handle, tokens=self._tokens)
            told.append(self._response(token=tokens))
            self._tokens = []
        if self._ending is not None and not self.is_told:
            self.is_told = True
            self._totals.num_open -= 1
            usage = None if self._totals.num_open else self._totals.usage(self.request)
            told.append(self._response(finished=self._ending, usage=usage))
        return told

    def _add(self, token_ids: Sequence[int], output: RequestOutput) -> None:
        self._totals.num_output_tokens += len(token_ids)
        if output.logprobs:
            for token_id, entry in zip(token_ids, output.logprobs, strict=False):
                self._tokens.append(_scored(logprobs_to_proto(token_id, entry)))
        else:
            self._tokens += [TokenInfo(token_id=token_id) for token_id in token_ids]
        if output.prompt_logprobs:
            if not self._prompt:  # the first token has no predecessor
                self._prompt.append(TokenInfo(token_id=self.request.prompt_token_ids[0]))
            self._prompt += map(_scored, prompt_logprobs_to_proto(output))

    def _stopped(self, text: str) -> GenerationFinished:
        return self._finished(FinishReason.STOP, StopMatch(stop_text=text))

    def _ended(self, reason: FinishReason, stop_token_id: int | None) -> GenerationFinished:
        if stop_token_id is None:
            return self._finished(reason, None)
        if stop_token_id in self._own_stop_token_ids:
            return self._finished(reason, StopMatch(stop_token_id=stop_token_id))
        return self._finished(reason, StopMatch(eos_token_id=stop_token_id))

    def _finished(self, reason: FinishReason, match: StopMatch | None) -> GenerationFinished:
        return GenerationFinished(
            output_index=self.request.handle, reason=FINISH_REASONS[reason], stop_match=match
        )

    def _response(self, **part: Any) -> GenerateResponse:
        return GenerateResponse(request_id=self._totals.request_id, **part)


def _scored(position: PositionLogprobs) -> TokenInfo:
    """Returns a token with its log-probability, and its rank if it is among the candidates."""
    chosen = position.chosen
    candidates = [
        LogProb(token_id=each.token_id, logprob=each.logprob, rank=rank)
        for rank, each in enumerate(position.top, 1)
    ]
    ranks = {each.token_id: each.rank for each in candidates}
    return TokenInfo(
        token_id=chosen.token_id,
        logprob=chosen.logprob,
        rank=ranks.get(chosen.token_id),
        candidates=candidates,
    )
