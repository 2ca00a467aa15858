"""A request's output as protobuf."""

from protos.common.v1 import sampling_pb2
from services.engine.request import FinishReason, PositionLogprobs, Request, RequestOutput

FINISH_REASONS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: sampling_pb2.FINISH_REASON_ABORTED,
}


def usage_of(request: Request) -> sampling_pb2.Usage:
    """Returns the usage of a request so far."""
    return sampling_pb2.Usage(
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        output_tokens=request.num_output_tokens,
        weights_version=request.weights_version,
        first_weights_version=request.first_weights_version,
    )


def logprobs_to_proto(token_id: int, entry: PositionLogprobs) -> sampling_pb2.PositionLogprobs:
    """Converts the log-probabilities of one output position."""
    return sampling_pb2.PositionLogprobs(
        chosen=sampling_pb2.TokenLogprob(token_id=token_id, logprob=entry.logprob),
        top=[
            sampling_pb2.TokenLogprob(token_id=top_id, logprob=logprob)
            for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        ],
    )


def prompt_logprobs_to_proto(output: RequestOutput) -> list[sampling_pb2.PositionLogprobs]:
    """Converts the log-probabilities of prompt tokens in an output."""
    entries, request = output.prompt_logprobs, output.request
    first = 1 + request.num_prompt_logprobs - len(entries)
    token_ids = request.prompt_token_ids[first : first + len(entries)]
    return list(map(logprobs_to_proto, token_ids, entries))
