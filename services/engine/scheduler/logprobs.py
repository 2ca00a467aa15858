"""Adds log-probabilities of tokens and prompts to the outputs of requests."""

from collections.abc import Sequence
from itertools import accumulate

from services.engine.batch import StepResult, read_logprobs, read_prompt_logprobs, read_tokens
from services.engine.request import RequestOutput, RequestStatus
from services.engine.scheduler.planned_step import PromptSpan, ScheduledStep


def attach_logprobs(
    outputs: Sequence[RequestOutput], step: ScheduledStep, result: StepResult
) -> None:
    """Adds log-probabilities to the outputs of requests that asked for them."""
    counts = [len(token_ids) for token_ids in read_tokens(result)]
    wanted = [
        request.sampling.logprobs
        for request, count in zip(step.requests, counts, strict=True)
        for _ in range(count)
    ]
    positions = read_logprobs(result, wanted)
    first = dict(zip(step.requests, accumulate(counts, initial=0), strict=False))
    for output in outputs:
        if output.request.sampling.logprobs is not None:
            start = first[output.request]
            found = positions[start : start + len(output.token_ids)]
            output.logprobs = [position for position in found if position is not None]


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
