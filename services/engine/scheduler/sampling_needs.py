"""The optional sampling work of requests, as bits."""

from dataclasses import replace

from services.engine.request import Request, SamplingParams

RANDOM, LOGIT_EDITS, MIN_TOKENS, LOGPROBS = 1, 2, 4, 8


def sampling_needs(sampling: SamplingParams) -> int:
    """Returns the optional sampling work of a request.

    Computed once per row: checking the parameters for every token costs 54 us in a step of 256
    requests.
    """
    needs = 0 if sampling.is_greedy else RANDOM
    if replace(sampling, min_tokens=0).has_logit_edits:
        needs |= LOGIT_EDITS
    if sampling.min_tokens and sampling.end_token_ids:
        needs |= MIN_TOKENS
    if sampling.logprobs is not None:
        needs |= LOGPROBS
    return needs


def num_short(request: Request, num_tokens: int) -> int:
    """Returns how many of its first min_tokens a request of `num_tokens` still lacks."""
    return request.num_prompt_tokens + request.sampling.min_tokens - num_tokens
