"""Hands requests the log-probabilities of their prompts, chunk by chunk."""

from collections.abc import Sequence

from services.engine.batch import StepResult, read_prompt_logprobs
from services.engine.request import RequestOutput, RequestStatus
from services.engine.scheduler.planned_step import PromptSpan


def attach_prompt_logprobs(
    outputs: list[RequestOutput], spans: Sequence[PromptSpan], result: StepResult
) -> None:
    """Adds them to the outputs of a step; a request that did not sample gets an output for them.

    A request that was preempted computes its prompt again: what it was told before is left out.
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
