"""Takes the tokens that a step sampled: each request keeps those up to its end."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from services.engine.batch import Int32Array, StepResult, read_int32, read_tokens
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
from services.engine.scheduler.decodes import Decodes
from services.engine.scheduler.holdings import Holdings
from services.engine.scheduler.planned_step import ScheduledStep
from services.engine.scheduler.step_outputs import StepOutputs, TokenColumn


def append_tokens(
    step: ScheduledStep,
    result: StepResult,
    holdings: Holdings,
    *,
    is_speculative: bool,
    at_s: float,
) -> StepOutputs:
    """Appends a step's tokens to its requests; ends requests with faulty logits.

    Args:
        step: the oldest step in flight.
        result: its result.
        holdings: has the requests.
        is_speculative: whether a request may get several tokens, some after its end.
        at_s: the time.

    Returns:
        An output for each request that sampled and is still live. Those in a column go on, others
        may be at their ends.
    """
    mark = StepMark(step.step_id, at_s)
    outputs = StepOutputs()
    if step.decodes is None:
        requests, token_ids = step.requests, read_tokens(result)
    else:
        all_ids, at = read_int32(result.token_ids), step.decodes_at
        requests = [*step.requests[: at.start], *step.requests[at.stop :]]
        token_ids = [[each] for each in np.delete(all_ids, at).tolist()] if requests else []
        _append_column(step.decodes, all_ids[at], holdings, mark, outputs)
    num_output = sum(len(each.requests) for each in outputs.columns)
    num_output += sum(len(each.token_ids) for each in outputs.others)
    # Python 3.11 takes 70 ns to look a member up.
    finished, prefill = RequestStatus.FINISHED, Stage.PREFILL
    for request, sampled in zip(requests, token_ids, strict=True):
        if request.status is finished:
            continue
        request.num_pending_tokens -= 1
        kept = cut_at_end(request, sampled) if is_speculative else sampled
        if kept[-1] < 0:
            holdings.end(request)
            outputs.others.append(RequestOutput(request, [], error=_without_a_token(request)))
            continue
        request.token_ids += kept
        num_output += len(kept)
        previous = request.last_token
        if previous is None:
            request.first_token = mark
        request.last_token = mark
        if request.times.stage is prefill:  # its first token, or the first after a preemption
            request.times.enter(Stage.DECODE, at_s)
        outputs.others.append(RequestOutput(request, kept, previous))
    holdings.counts.output_tokens += num_output
    holdings.last_mark = mark
    return outputs


def _append_column(
    decodes: Decodes,
    token_ids: Int32Array,
    holdings: Holdings,
    mark: StepMark,
    outputs: StepOutputs,
) -> None:
    """Appends one token to each decode; adds a column, and outputs of requests that end or may."""
    requests, sampled = decodes.requests, token_ids.tolist()
    for index in np.flatnonzero(token_ids < 0).tolist() if token_ids.min() < 0 else ():
        request = requests[index]
        if request.status is not RequestStatus.FINISHED:
            request.num_pending_tokens -= 1
            holdings.end(request)
            outputs.others.append(RequestOutput(request, [], error=_without_a_token(request)))
    ending: set[Request] = set()
    if not holdings.end_token_ids.isdisjoint(sampled):
        both = zip(requests, sampled, strict=True)
        ending = {each for each, token_id in both if token_id in each.sampling.end_token_ids}
    finished, last_mark = RequestStatus.FINISHED, holdings.last_mark
    assert last_mark is not None, "an earlier step sampled the token before"
    apart: set[Request] = set()
    strays: list[StepMark] = []  # of requests whose last token is not of the last step
    for request, token_id in zip(requests, sampled, strict=True):
        if request.status is finished:
            apart.add(request)
            continue
        request.num_pending_tokens -= 1
        known, previous = request.token_ids, request.last_token
        known.append(token_id)
        request.last_token = mark
        if len(known) >= request.max_num_tokens or (ending and request in ending):
            apart.add(request)
            outputs.others.append(RequestOutput(request, [token_id], previous))
        elif previous is not last_mark and previous is not None:
            strays.append(previous)
    if apart:
        kept = [index for index, request in enumerate(requests) if request not in apart]
        requests, token_ids = [requests[index] for index in kept], token_ids[kept]
    waited: dict[StepMark, int] = Counter(strays) if strays else {}
    waited[last_mark] = len(requests) - len(strays)
    column = TokenColumn(requests=requests, token_ids=token_ids, waited=waited, at_s=mark.at_s)
    outputs.columns.append(column)


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
