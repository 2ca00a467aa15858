"""One output of a call, until it is written."""

from dataclasses import dataclass

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


class OpenEngineOutput:
    """Collects the output of one request, in chunks of new tokens."""

    def __init__(
        self,
        request: Request,
        totals: CallTotals,
        *,
        own_stop_token_ids: frozenset[int],
        stop_strings: StopStrings | None,
    ) -> None:
        self.request = request
        self.is_told = False
        """Whether the ending was written."""
        self._totals = totals
        self._own_stop_token_ids = own_stop_token_ids
        self._stop_strings = stop_strings
        self._prompt: list[TokenInfo] = []
        self._tokens: list[TokenInfo] = []
        self._ending: GenerationFinished | None = None
        totals.num_open += 1

    @property
    def is_over(self) -> bool:
        """Whether the output is complete; its request may still run."""
        return self._ending is not None

    def take(self, output: RequestOutput) -> None:
        """Takes one step's output; ignores it after the end."""
        if self.is_over:
            return
        token_ids = output.token_ids
        found = self._stop_strings.find(token_ids) if self._stop_strings is not None else None
        if found is not None:
            token_ids = token_ids[: found.num_tokens]
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
        if found is not None:
            self._ending = self._end(FinishReason.STOP, StopMatch(stop_text=found.text))
        elif output.finish_reason is not None:
            self._ending = self._end(output.finish_reason, self._match(output.stop_token_id))

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

    def _end(self, reason: FinishReason, match: StopMatch | None) -> GenerationFinished:
        return GenerationFinished(
            output_index=self.request.handle, reason=FINISH_REASONS[reason], stop_match=match
        )

    def _match(self, stop_token_id: int | None) -> StopMatch | None:
        if stop_token_id is None:
            return None
        if stop_token_id in self._own_stop_token_ids:
            return StopMatch(stop_token_id=stop_token_id)
        return StopMatch(eos_token_id=stop_token_id)

    def _response(
        self,
        *,
        prompt: PromptOutput | None = None,
        token: TokenOutput | None = None,
        finished: GenerationFinished | None = None,
        usage: Usage | None = None,
    ) -> GenerateResponse:
        return GenerateResponse(
            request_id=self._totals.request_id,
            prompt=prompt,
            token=token,
            finished=finished,
            usage=usage,
        )


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
