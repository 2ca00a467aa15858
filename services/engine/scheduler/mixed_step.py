"""Bounds the length of steps in which some requests decode and others compute their prompts."""

from services.engine.config.scheduler import PROMPT_SHARE
from services.engine.limits import StepLimits
from services.engine.scheduler.holdings import Holdings

_FEW_STEPS = 4
"""Mixed steps that the prompts at hand may take before steps are whole again."""


def most_tokens(budget: int, limits: StepLimits, holdings: Holdings) -> int:
    """Returns the most query tokens of the next step, at most `budget`.

    Requests that decode wait for the step's prompts, so that these have shorter chunks: of
    max_num_mixed_tokens in all, but a quarter of that beside decodes, however many they are. Long
    steps compute more tokens a second, so they return where more prompts have gathered than
    _FEW_STEPS such steps compute: else a busy engine would answer ever later.
    """
    most, prompts = limits.max_num_mixed_tokens, holdings.prompts
    num_running = len(holdings.running)
    if most is None or most >= budget:
        return budget
    is_full = num_running >= limits.max_num_seqs
    if len(prompts) == num_running or (is_full and not prompts):
        return budget
    num_left = sum(each.num_prompt_tokens - each.num_computed_tokens for each in prompts)
    has_images, most_left = any(each.images for each in prompts), _FEW_STEPS * most
    for request in holdings.waiting:
        if num_left > most_left:
            break
        num_left += request.num_prompt_tokens
        has_images |= bool(request.images)
    if num_left > most_left:
        return budget
    most_of_prompts = max(most // PROMPT_SHARE, limits.max_whole_tokens if has_images else 0)
    return min(budget, max(most, num_running * limits.decode_q_len + most_of_prompts))
