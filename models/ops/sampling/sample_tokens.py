"""Draws one token per row from truncated distributions, without a sort.

Order: temperature, top-k, top-p on the rest, min-p. Tokens of one logit are kept or dropped
together:

    top-k   keeps the logits of which fewer than k tokens have a larger one;
    top-p   keeps the largest logit, and those above which less than top_p of the weight is;
    min-p   keeps the tokens that weigh at least min_p times the largest.

The draw inverts the cumulative weights, in token id order, at one uniform number per row. It is
integer arithmetic (token_weights), so the kernel and the reference, which does sort, choose the
same token.
"""

import torch
from torch import Tensor

from models.kernels.gpu import has_kernels
from models.operands.draws import NO_TOKEN, WEIGHT_BITS
from models.ops.sampling.token_weights import scale_of, weights_at
from models.ops.sampling.uniform import uniform


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Returns one token per row, [S] int64; greedy rows get the most likely one, lowest id first.

    A row whose largest logit is NaN or infinite gets NO_TOKEN.

    logits: [S, V], V below 2**19.
    temperature, top_p, min_p: [S] float32; 0 is greedy, 1 and 0 keep all.
    top_k: [S] int64, 0 keeps all.
    seeds, positions: [S] int64 and int32, the two parts of each row's seed.
    """
    if has_kernels(logits.device):
        from models.kernels.sampling import sample_tokens as kernel

        return kernel.sample_tokens(
            logits.contiguous(), temperature, top_k, top_p, min_p, seeds, positions
        )
    weights = kept_weights(logits, temperature, top_k, top_p, min_p)
    cumulative = weights.cumsum(dim=-1)
    u = uniform(seeds, positions)
    threshold = (u * cumulative[:, -1].double()).long()
    drawn = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)
    largest, most_likely = logits.max(dim=-1)
    return where_sound(largest, torch.where(temperature == 0, most_likely, drawn))


def where_sound(largest: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the tokens, and NO_TOKEN where a row's largest logit is NaN or infinite."""
    return token_ids.masked_fill(~largest.isfinite(), NO_TOKEN)


def kept_weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Returns the weight of each token, [S, V] int64, 0 where a truncation drops it.

    Greedy rows weigh as at temperature 1. Synchronises with the device.
    """
    logits = logits.float()
    depths = logits.amax(dim=-1, keepdim=True) - logits
    scales = scale_of(torch.where(temperature == 0, 1.0, temperature))
    weights = weights_at(depths, scales)
    num_candidates = _num_candidates(logits.shape[-1], temperature, top_k, top_p)
    if num_candidates:
        cut = _top_k_top_p_cut(depths, weights, scales, top_k, top_p, num_candidates)
        weights = weights.masked_fill(depths > cut[:, None], 0)
    lightest = (min_p.double() * 2.0**WEIGHT_BITS).long()
    return weights.masked_fill(weights < lightest[:, None], 0)


def _num_candidates(vocab_size: int, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> int:
    """Returns how many of the most likely tokens the truncations need."""
    draws = temperature > 0
    top_k = torch.where(draws & (top_k < vocab_size), top_k, 0)
    if bool((draws & (top_p < 1) & (top_k == 0)).any()):
        return vocab_size
    return int(top_k.max())


def _top_k_top_p_cut(
    depths: Tensor,
    weights: Tensor,
    scales: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    num_candidates: int,
) -> Tensor:
    """Returns [S], the largest depth that top-k and then top-p keep."""
    candidates = depths.topk(num_candidates, dim=-1, largest=False).values
    has_top_k = (top_k > 0) & (top_k < depths.shape[-1])
    # A greedy row's top-k is not among the candidates' and may be larger.
    kth = (top_k - 1).clamp(min=0, max=num_candidates - 1)
    kth_depth = candidates.gather(-1, kth[:, None]).squeeze(-1)
    cut = torch.where(has_top_k, kth_depth, torch.inf)
    total = weights.masked_fill(depths > cut[:, None], 0).sum(dim=-1)
    nucleus = (top_p.double() * total.double()).long().clamp(min=1)
    shares = weights_at(candidates, scales)
    before = shares.cumsum(dim=-1) - shares
    last = (before < nucleus[:, None]).sum(dim=-1) - 1
    nucleus_depth = candidates.gather(-1, last[:, None]).squeeze(-1)
    return torch.where(top_p < 1, torch.minimum(cut, nucleus_depth), cut)
