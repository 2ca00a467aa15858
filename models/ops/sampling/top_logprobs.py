"""Log-probabilities of one token and of the most likely ones, without a log-softmax."""

import torch
from torch import Tensor

from models.kernels.gpu import has_kernels


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the log-probability of each row's token, and ids and values of its most likely ones.

    Maps logits [S, V] and token_ids [S] int64 to [S] float32, [S, n] int64 and [S, n] float32, best
    first; the lowest id first on a tie. n is num_top, at most V.
    """
    if has_kernels(logits.device):
        from models.kernels.sampling import top_logprobs as kernel

        return kernel.top_logprobs(logits.contiguous(), token_ids, num_top)
    logits = logits.float()
    # Subtracting the sum from the few reported logits saves a [S, V] log_softmax.
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (logits.gather(-1, token_ids[:, None]) - log_total).squeeze(-1)
    if not num_top:
        empty = logits.new_empty(len(logits), 0)
        return chosen, empty.long(), empty
    # A stable sort: topk does not define the order of ties.
    top = torch.sort(logits, dim=-1, descending=True, stable=True)
    return chosen, top.indices[:, :num_top], top.values[:, :num_top] - log_total
