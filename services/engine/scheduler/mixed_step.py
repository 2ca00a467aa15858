"""Bounds the length of steps in which some requests decode and others compute their prompts."""

from collections.abc import Iterable, Sequence

from services.engine.limits import StepLimits
from services.engine.request import Request
from services.engine.scheduler.planned_step import PROMPT_SHARE

_FEW_STEPS = 4
"""Mixed steps that the prompts at hand may take before steps are whole again."""


def most_tokens(
    budget: int, limits: StepLimits, running: Sequence[Request], waiting: Iterable[Request]
) -> int:
    """Returns the most query tokens of the next step, at most `budget`.

    Requests that decode wait for the step's prompts, so that these have shorter chunks: of
    max_num_mixed_tokens in all, but a quarter of that beside decodes, however many they are. Long
    steps compute more tokens a second, so they return where more prompts have gathered than
    _FEW_STEPS such steps compute: else a busy engine would answer ever later.
    """
    most = limits.max_num_mixed_tokens
    if most is None or most >= budget:
        return budget
    has_decodes, has_images, num_left, most_left = False, False, 0, _FEW_STEPS * most
    for request in running:
        left = request.num_prompt_tokens - request.num_computed_tokens
        if left > 0:
            num_left += left
            has_images |= bool(request.images)
        else:
            has_decodes = True
    if not has_decodes:
        return budget
    for request in waiting:
        if num_left > most_left:
            break
        num_left += request.num_prompt_tokens
        has_images |= bool(request.images)
    if num_left > most_left:
        return budget
    most_of_prompts = max(most // PROMPT_SHARE, limits.max_whole_tokens if has_images else 0)
    return min(budget, max(most, len(running) * limits.decode_q_len + most_of_prompts))
