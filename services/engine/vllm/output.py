"""One output of a call, until it is written."""

from collections.abc import Sequence

from smg_grpc_proto.generated.vllm_engine_pb2 import (
    GenerateComplete,
    GenerateResponse,
    GenerateStreamChunk,
    InputLogProbs,
    InputTokenLogProb,
    OutputLogProbs,
    TopLogProbs,
)

from protos.common.v1.sampling_pb2 import PositionLogprobs
from services.engine.edge.call import CallOutput
from services.engine.edge.output import logprobs_to_proto, prompt_logprobs_to_proto
from services.engine.edge.stop_strings import StopStrings
from services.engine.request import FinishReason, Request, RequestOutput

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}


class VllmOutput(CallOutput[GenerateComplete]):
    """Collects the output of one request.

    A streamed output is written in chunks of new output and an ending without repetition. Otherwise
    the ending has the whole output.
    """

    def __init__(
        self,
        request: Request,
        *,
        is_streamed: bool,
        own_stop_token_ids: frozenset[int],
        stop_strings: StopStrings | None,
    ) -> None:
        super().__init__(request, own_stop_token_ids, stop_strings)
        self._is_streamed = is_streamed
        self._token_ids: list[int] = []
        self._logprobs = OutputLogProbs()
        self._prompt_logprobs = InputLogProbs()
        self._num_tokens = 0

    def responses(self) -> list[GenerateResponse]:
        """Returns the messages to write now."""
        told = []
        if self._is_streamed and self._token_ids:
            told.append(GenerateResponse(chunk=self._chunk()))
        if self._ending is not None and not self.is_told:
            self.is_told = True
            told.append(GenerateResponse(complete=self._complete(self._ending)))
        return told

    def _add(self, token_ids: Sequence[int], output: RequestOutput) -> None:
        self._token_ids += token_ids
        self._num_tokens += len(token_ids)
        for token_id, entry in zip(token_ids, output.logprobs, strict=False):  # all or none
            _add_logprobs(self._logprobs, logprobs_to_proto(token_id, entry))
        if output.prompt_logprobs:
            self._add_prompt_logprobs(output)

    def _stopped(self, text: str) -> GenerateComplete:
        return GenerateComplete(finish_reason="stop", matched_stop_str=text)

    def _ended(self, reason: FinishReason, stop_token_id: int | None) -> GenerateComplete:
        ending = GenerateComplete(finish_reason=FINISH_REASONS[reason])
        if stop_token_id in self._own_stop_token_ids:  # an end-of-sequence token is not reported
            ending.matched_token_id = stop_token_id
        return ending

    def _add_prompt_logprobs(self, output: RequestOutput) -> None:
        told = self._prompt_logprobs
        if not told.token_ids:  # the first token has no predecessor
            told.token_ids.append(self.request.prompt_token_ids[0])
            told.token_logprobs.append(InputTokenLogProb())
            told.top_logprobs.append(TopLogProbs())
        for position in prompt_logprobs_to_proto(output):
            told.token_ids.append(position.chosen.token_id)
            told.token_logprobs.append(InputTokenLogProb(value=position.chosen.logprob))
            told.top_logprobs.append(_top(position))

    def _chunk(self) -> GenerateStreamChunk:
        chunk = GenerateStreamChunk(
            token_ids=self._token_ids,
            prompt_tokens=self.request.num_prompt_tokens,
            completion_tokens=len(self._token_ids),
            cached_tokens=self.request.num_cached_tokens,
            index=self.request.handle,
        )
        self._token_ids = []
        if self._logprobs.token_ids:
            chunk.output_logprobs.CopyFrom(self._logprobs)
            self._logprobs = OutputLogProbs()
        if self._prompt_logprobs.token_ids:
            chunk.input_logprobs.CopyFrom(self._prompt_logprobs)
            self._prompt_logprobs = InputLogProbs()
        return chunk

    def _complete(self, complete: GenerateComplete) -> GenerateComplete:
        complete.output_ids.extend(self._token_ids)
        complete.prompt_tokens = self.request.num_prompt_tokens
        complete.completion_tokens = self._num_tokens
        complete.cached_tokens = self.request.num_cached_tokens
        complete.index = self.request.handle
        if self._logprobs.token_ids:
            complete.output_logprobs.CopyFrom(self._logprobs)
        if self._prompt_logprobs.token_ids:
            complete.input_logprobs.CopyFrom(self._prompt_logprobs)
        return complete


def _add_logprobs(told: OutputLogProbs, position: PositionLogprobs) -> None:
    told.token_ids.append(position.chosen.token_id)
    told.token_logprobs.append(position.chosen.logprob)
    told.top_logprobs.append(_top(position))


def _top(position: PositionLogprobs) -> TopLogProbs:
    return TopLogProbs(
        token_ids=[entry.token_id for entry in position.top],
        values=[entry.logprob for entry in position.top],
    )
