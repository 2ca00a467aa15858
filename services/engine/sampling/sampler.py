"""From logits to tokens, for all rows of a batch at once.

The order is: logit edits (services.engine.sampling.logit_edits), temperature, top-k, top-p on what
top-k left, min-p. Each truncation becomes one cut per row, the smallest logit that stays, so tokens
that tie with the last one kept are kept too, whatever their order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.sampling.uniform import uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """How the tokens of S rows are chosen, all tensors [S].

    temperature, top_p, min_p: float32; temperature 0 is greedy.
    top_k: int64, 0 keeps all.
    seeds: int64. positions: integers, the position the chosen token will take in its sequence.
    num_candidates: most likely tokens that the truncations must look at: 0 when no row has top-k or
        top-p, else at least every top_k, and the vocabulary when a row has top-p alone.
    has_min_p, has_greedy: whether any row has a min_p above 0, or is greedy.
    What the host knows of a batch spares passes over [S, V] that would change nothing.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    num_candidates: int
    has_min_p: bool
    has_greedy: bool


def greedy(logits: Tensor) -> Tensor:
    """Returns the most likely token of each row [S, V], the lowest id on a tie, as [S] int64."""
    return logits.argmax(dim=-1)


def sample(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Draws one token per row; greedy rows get their most likely token.

    Args:
        logits: [S, V] float32, edits applied.
        choice: parameters of each row.

    Returns:
        [S] int64.
    """
    drawn = _draw(_weights(logits, choice), uniform(choice.seeds, choice.positions))
    if not choice.has_greedy:
        return drawn
    return torch.where(choice.temperature == 0, greedy(logits), drawn)


def probabilities(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Returns the distribution [S, V] float32 that `sample` draws from where it is not greedy."""
    weights = _weights(logits, choice)
    return weights / weights.sum(dim=-1, keepdim=True)


def _weights(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Returns each token's share of its row's largest probability, 0 beyond the cut."""
    temperature = torch.where(choice.temperature == 0, 1.0, choice.temperature)
    # The largest logit becomes 0 before the division, so no temperature overflows to inf.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled.div_(temperature[:, None])
    cuts = []
    if choice.num_candidates:
        cuts.append(_top_k_top_p_cut(scaled, choice))
    if choice.has_min_p:
        cuts.append(choice.min_p.log())
    for cut in cuts:
        scaled.masked_fill_(scaled < cut[:, None], -torch.inf)
    return scaled.exp_()


def _top_k_top_p_cut(scaled: Tensor, choice: TokenChoice) -> Tensor:
    """Returns [S], the smallest scaled logit that top-k and then top-p keep."""
    num_candidates = min(choice.num_candidates, scaled.shape[-1])
    candidates = scaled.topk(num_candidates, dim=-1).values
    has_top_k = (choice.top_k > 0) & (choice.top_k < scaled.shape[-1])
    # A greedy row's top-k does not count towards the candidates and may be larger.
    num_kept = torch.where(has_top_k, choice.top_k, num_candidates).clamp(max=num_candidates)
    rank = torch.arange(num_candidates, device=scaled.device)
    candidates = candidates.masked_fill(rank >= num_kept[:, None], -torch.inf)
    shares = candidates.softmax(dim=-1)
    before = shares.cumsum(dim=-1) - shares
    in_nucleus = (before < choice.top_p[:, None]).sum(dim=-1).clamp(max=num_kept)
    # A row with neither has no cut: the candidates may be fewer than its vocabulary.
    last = torch.where(choice.top_p < 1, in_nucleus, num_kept) - 1
    # A top-p that fp32 rounds to 0 keeps one token all the same.
    cut = candidates.gather(-1, last.clamp(min=0)[:, None]).squeeze(-1)
    return torch.where(has_top_k | (choice.top_p < 1), cut, -torch.inf)


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverts the cumulative distribution, tokens in the order of their ids.

    The sums are fp64: in fp32 a large vocabulary loses its rare tokens to rounding.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    threshold = u[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    # NaN logits compare with nothing and would name a token that does not exist, which a GPU's
    # next embedding look-up takes as a fatal error for every request.
    return drawn.clamp(max=weights.shape[-1] - 1)
