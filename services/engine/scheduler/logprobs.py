"""Adds log-probabilities of tokens and prompts to the outputs of requests."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from services.engine.batch import StepResult, read_float32, read_int32
from services.engine.request import PositionLogprobs, RequestOutput, RequestStatus
from services.engine.scheduler.planned_step import PromptSpan, ScheduledStep


def attach_logprobs(
    outputs: Sequence[RequestOutput], step: ScheduledStep, result: StepResult
) -> None:
    """Adds log-probabilities to the outputs of requests that asked for them."""
    starts: Iterable[int] = range(len(step.requests))
    if result.num_accepted_tokens:
        counts = read_int32(result.num_accepted_tokens) + 1
        starts = accumulate(counts.tolist(), initial=0)
    first = dict(zip(step.requests, starts, strict=False))
    asking: list[RequestOutput] = []
    wanted: list[tuple[Sequence[int], int]] = []
    for output in outputs:
        if (num_top := output.request.sampling.logprobs) is not None:
            start = first[output.request]
            asking.append(output)
            wanted.append((range(start, start + len(output.token_ids)), num_top))
    for output, entries in zip(asking, read_logprobs(result, wanted), strict=True):
        output.logprobs = entries


def attach_prompt_logprobs(
    outputs: list[RequestOutput], spans: Sequence[PromptSpan], result: StepResult
) -> None:
    """Adds prompt log-probabilities to a step's outputs, with new outputs for unsampled requests.

    A preempted request computes its prompt again; values that it already has are left out.
    """
    counts = [(span.count, span.request.sampling.prompt_logprobs or 0) for span in spans]
    output_of = {output.request: output for output in outputs}
    for span, entries in zip(spans, read_prompt_logprobs(result, counts), strict=True):
        request = span.request
        output = output_of.get(request)
        if output is None:
            if request.status is RequestStatus.FINISHED:
                continue
            output = RequestOutput(request, [])
            outputs.append(output)
        new = entries[request.num_prompt_logprobs + 1 - span.start :]
        output.prompt_logprobs = new
        request.num_prompt_logprobs += len(new)


def read_logprobs(
    result: StepResult, wanted: Iterable[tuple[Sequence[int], int]]
) -> Iterator[list[PositionLogprobs]]:
    """Yields the log-probabilities of sampled tokens by request.

    Args:
        result: a result with logprobs.
        wanted: for each request its tokens' positions among all that were sampled, and the most
            likely ones that it asked for.
    """
    chosen = read_float32(result.logprobs).tolist()
    shape = (len(chosen), result.num_top_logprobs)
    top_ids = read_int32(result.top_token_ids).reshape(shape)
    top_logprobs = read_float32(result.top_logprobs).reshape(shape)
    for positions, num_top in wanted:
        yield [
            PositionLogprobs(
                logprob=chosen[i],
                top_token_ids=tuple(top_ids[i, :num_top].tolist()),
                top_logprobs=tuple(top_logprobs[i, :num_top].tolist()),
            )
            for i in positions
        ]


def read_prompt_logprobs(
    result: StepResult, counts: Sequence[tuple[int, int]]
) -> list[list[PositionLogprobs]]:
    """Returns the log-probabilities of prompt tokens by request.

    Args:
        result: a result with them.
        counts: for each request its tokens and the most likely ones that it asked for.
    """
    chosen = read_float32(result.prompt_logprobs).tolist()
    shape = (len(chosen), result.num_prompt_top_logprobs)
    top_ids = read_int32(result.prompt_top_token_ids).reshape(shape)
    top_logprobs = read_float32(result.prompt_top_logprobs).reshape(shape)
    told: list[list[PositionLogprobs]] = []
    start = 0
    for num_tokens, num_top in counts:
        told.append(
            [
                PositionLogprobs(
                    logprob=chosen[i],
                    top_token_ids=tuple(top_ids[i, :num_top].tolist()),
                    top_logprobs=tuple(top_logprobs[i, :num_top].tolist()),
                )
                for i in range(start, start + num_tokens)
            ]
        )
        start += num_tokens
    return told
