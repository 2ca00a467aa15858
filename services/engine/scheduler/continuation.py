"""Gives running requests their next tokens: decodes, drafts and chunks of prompts."""

from collections.abc import Sequence

from services.engine.limits import StepLimits
from services.engine.request import Request
from services.engine.scheduler.holdings import Holdings
from services.engine.scheduler.planned_step import PlannedStep
from services.engine.spec_decode.draft_plan import DraftPlan


def continue_running(
    step: PlannedStep, holdings: Holdings, limits: StepLimits, drafts: DraftPlan | None
) -> None:
    """Gives every running request its next tokens; preempts the last ones if blocks run out.

    Args:
        step: a step without requests.
        holdings: has the running requests.
        limits: of steps and sequences.
        drafts: says which blocks drafts need; None without speculative decoding.
    """
    running, states = holdings.running, holdings.cache.states
    share = PipelineShare(running, limits.num_stages) if limits.num_stages > 1 else None
    decoding: list[Request] = []
    num_deducted = 0  # of the decodes, whose budget is taken together
    for index, request in enumerate(running):  # preemption shortens the list from its end
        num_computed = request.num_computed_tokens
        if num_computed >= request.num_plain_tokens:
            num_tokens = len(request.token_ids) + request.num_pending_tokens
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is pending
            if share is not None and not share.take(request):
                continue
            if not request.num_plain_tokens:
                if not request.awaits_mask:
                    step.budget -= len(decoding) - num_deducted
                    num_deducted = len(decoding)
                    num_tokens += request.num_pending_drafts
                    _compute_next(step, holdings, drafts, index=index, num_tokens=num_tokens)
                continue
            if not _add_blocks(step, holdings, request, num_tokens):
                continue
            if states is not None:
                holdings.counts.num_snapshots_made += holdings.cache.save_state(request)
            end = num_computed + limits.block_size
            request.num_plain_tokens = min(request.max_num_tokens - 1, end)
        request.num_computed_tokens = num_computed + 1
        request.num_pending_tokens += 1
        decoding.append(request)
    step.budget -= len(decoding) - num_deducted
    if (decodes := holdings.decodes.next(decoding)) is not None:
        step.decode(decodes)


def _compute_next(
    step: PlannedStep,
    holdings: Holdings,
    drafts: DraftPlan | None,
    *,
    index: int,
    num_tokens: int,
) -> None:
    """Adds a running request's next tokens, or preempts it if it is the last and finds no block.

    Args:
        step: the step.
        holdings: has the running requests.
        drafts: says which blocks drafts need; None without speculative decoding.
        index: the request's index in `Holdings.running`.
        num_tokens: all its tokens, known and pending, with the drafts in flight.
    """
    request = holdings.running[index]
    row = request.row
    assert row is not None, "a running request has a row"
    q_len = num_tokens - request.num_computed_tokens + request.num_drafts
    if q_len > 1:
        q_len = step.bound(q_len, holdings.running, index)
        if holdings.cache.states is not None:
            q_len = holdings.cache.states.cut(request, q_len)
    if request.images:
        most = step.room(holdings.running, index)
        q_len = holdings.images.bound(request, request.num_computed_tokens, q_len, most)
        if not q_len:
            return  # its next image is for a later step
    end = request.num_computed_tokens + q_len
    if not _add_blocks(step, holdings, request, end if drafts is None else drafts.reach(end)):
        return
    holdings.counts.num_snapshots_made += holdings.cache.save_state(request)
    step.compute(request, row, q_len, num_tokens)
    if end >= num_tokens:
        holdings.decode_plainly(request)
    if q_len > 1:  # share prompts at once
        holdings.cache.cache_full_blocks(request)


def _add_blocks(step: PlannedStep, holdings: Holdings, request: Request, num_tokens: int) -> bool:
    """Gives a running request blocks for its first tokens; returns whether it still runs."""
    row, num_blocks = request.row, len(request.block_ids)
    assert row is not None, "a running request has a row"
    added = holdings.allocate(request, num_tokens)
    if added:
        step.add_blocks(row, num_blocks, added)
    return added is not None


class PipelineShare:
    """Chooses the running requests of one step, so that each pipeline stage has decodes to run.

    Each stage runs one of the steps in flight. A request is scheduled again only after its result
    is back: only the last stage has the token.
    """

    def __init__(self, running: Sequence[Request], num_stages: int) -> None:
        """Gives the step an equal share of the decodes.

        Args:
            running: the running requests.
            num_stages: pipeline stages, hence steps in flight.
        """
        num_decodes = sum(
            request.num_computed_tokens >= request.num_prompt_tokens for request in running
        )
        self._num_decodes_left = -(-num_decodes // num_stages)

    def take(self, request: Request) -> bool:
        """Returns whether a running request is for this step; a decode then uses up its place."""
        if request.num_pending_tokens:
            return False  # its next position, or its next token, is unknown
        if request.num_computed_tokens < request.num_prompt_tokens:
            return True
        if request.awaits_mask or not self._num_decodes_left:
            return False
        self._num_decodes_left -= 1
        return True
