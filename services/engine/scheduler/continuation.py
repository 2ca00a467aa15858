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
    running, block_size, num_groups = holdings.running, limits.block_size, limits.num_groups
    states = holdings.cache.states
    interval = 0 if states is None or not states.is_caching else states.interval
    share = PipelineShare(running, limits.num_stages) if limits.num_stages > 1 else None
    is_plain = share is None and drafts is None and states is None
    decoding = []
    num_deducted = 0  # of the decodes, whose budget is taken together
    for index, request in enumerate(running):  # preemption shortens the list from its end
        num_computed = request.num_computed_tokens
        if num_computed < request.num_plain_tokens:
            request.num_computed_tokens = num_computed + 1
            request.num_pending_tokens += 1
            decoding.append(request)
            continue
        num_tokens = len(request.token_ids) + request.num_pending_tokens
        if num_tokens >= request.max_num_tokens:
            continue  # its last token is pending
        if share is not None and not share.take(request):
            continue
        num_tokens += request.num_pending_drafts
        if (
            num_tokens - num_computed == 1
            and drafts is None
            and (request.constraint is None or not request.needs_mask)
            and num_computed >= request.num_prompt_tokens
            and (states is None or num_tokens * num_groups <= len(request.block_ids) * block_size)
            and (not interval or num_computed % interval)
        ):
            num_blocks = len(request.block_ids)
            added = holdings.allocate(request, num_tokens)
            if added is None:
                continue
            if added:
                step.add_blocks(_row_of(request), num_blocks, added)
            request.num_computed_tokens = num_tokens
            request.num_pending_tokens += 1
            decoding.append(request)
            if is_plain and request.constraint is None:
                num_held = len(request.block_ids) // num_groups * block_size
                request.num_plain_tokens = min(request.max_num_tokens - 1, num_held)
        elif not request.awaits_mask:
            step.budget -= len(decoding) - num_deducted
            num_deducted = len(decoding)
            _compute_next(step, holdings, drafts, index=index, num_tokens=num_tokens)
    step.budget -= len(decoding) - num_deducted
    step.decode(decoding)


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
    row = _row_of(request)
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
    num_blocks = len(request.block_ids)
    added = holdings.allocate(request, end if drafts is None else drafts.reach(end))
    if added is None:
        return
    if added:
        step.add_blocks(row, num_blocks, added)
    holdings.counts.num_snapshots_made += holdings.cache.save_state(request)
    step.compute(request, row, q_len, num_tokens)
    if q_len > 1:  # share prompts at once
        holdings.cache.cache_full_blocks(request)


def _row_of(request: Request) -> int:
    assert request.row is not None, "a running request has a row"
    return request.row


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
