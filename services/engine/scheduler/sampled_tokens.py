"""Takes the tokens that a step sampled: each request keeps those up to its end."""

from collections.abc import Sequence

from services.engine.batch import StepResult, read_tokens
from services.engine.errors import EngineError, InvalidRequestError, RequestFaultError
from services.engine.grammar.token_rules import without
from services.engine.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestStatus,
    StepMark,
)
from services.engine.request_times import Stage
from services.engine.scheduler.holdings import Holdings
from services.engine.scheduler.planned_step import ScheduledStep


def append_tokens(
    step: ScheduledStep,
    result: StepResult,
    holdings: Holdings,
    *,
    is_speculative: bool,
    at_s: float,
) -> list[RequestOutput]:
    """Appends a step's tokens to its requests; ends requests with faulty logits.

    Args:
        step: the oldest step in flight.
        result: its result.
        holdings: has the requests.
        is_speculative: whether a request may get several tokens, some after its end.
        at_s: the time.

    Returns:
        One output for each request that sampled and is still live.
    """
    mark = StepMark(step.step_id, at_s)
    num_output = 0
    outputs: list[RequestOutput] = []
    # Python 3.11 takes 70 ns to look a member up.
    finished, prefill = RequestStatus.FINISHED, Stage.PREFILL
    for request, token_ids in zip(step.requests, read_tokens(result), strict=True):
        if request.status is finished:
            continue
        request.num_pending_tokens -= 1
        kept = cut_at_end(request, token_ids) if is_speculative else token_ids
        if kept[-1] < 0:
            holdings.end(request)
            outputs.append(RequestOutput(request, [], error=_without_a_token(request)))
            continue
        request.token_ids += kept
        num_output += len(kept)
        previous = request.last_token
        if previous is None:
            request.first_token = mark
        request.last_token = mark
        if request.times.stage is prefill:  # its first token, or the first after a preemption
            request.times.enter(Stage.DECODE, at_s)
        outputs.append(RequestOutput(request, kept, previous))
    holdings.counts.output_tokens += num_output
    return outputs


def _without_a_token(request: Request) -> EngineError:
    """Returns why no token could be chosen for a request."""
    num_output, min_tokens = request.num_output_tokens, request.sampling.min_tokens
    mask = None if request.constraint is None else request.constraint.mask
    if mask is not None and not any(without(mask, request.sampling.banned_token_ids)):
        return InvalidRequestError(
            f"after {num_output} tokens of output, allowed_token_ids, forbidden_sequences and"
            " structured_output together allow none"
        )
    if request.constraint is not None and num_output < min_tokens:
        return InvalidRequestError(
            f"min_tokens is {min_tokens}, but after {num_output} tokens structured_output or "
            "allowed_token_ids allows none that does not end the output"
        )
    return RequestFaultError("the largest of its logits was NaN or infinite")


def conclude(outputs: Sequence[RequestOutput], holdings: Holdings) -> None:
    """Ends requests that are done with these tokens and advances the grammars of others."""
    for output in outputs:
        if output.error is not None:
            continue
        request, token_id = output.request, output.token_ids[-1]
        sampling = request.sampling
        if token_id in sampling.end_token_ids and request.num_output_tokens > sampling.min_tokens:
            output.finish_reason = FinishReason.STOP
            output.stop_token_id = token_id
            holdings.end(request)
        elif len(request.token_ids) >= request.max_num_tokens:
            output.finish_reason = FinishReason.LENGTH
            holdings.end(request)
        elif request.constraint is not None:
            for each in output.token_ids:
                request.constraint.advance(each)
            # The last token decides which drafts may follow.
            num_drafts = max(0, request.constraint.num_free_tokens - 1)
            del request.draft_token_ids[num_drafts:]


def cut_at_end(request: Request, token_ids: list[int]) -> list[int]:
    """Returns a request's new tokens up to the one that ends it, if any does."""
    sampling = request.sampling
    num_too_few = sampling.min_tokens - request.num_output_tokens
    within = token_ids[: request.max_num_tokens - len(request.token_ids)]
    for index, token_id in enumerate(within):
        if token_id in sampling.end_token_ids and index >= num_too_few:
            return within[: index + 1]
    return within
