"""Log-probabilities of chosen and most likely tokens."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms of probabilities for S rows.

    chosen: [S] float32. top_token_ids: [S, n] int64 and top: [S, n] float32, best first.
    """

    chosen: Tensor
    top_token_ids: Tensor
    top: Tensor


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Returns the log-probability of each row's token and of its `num_top` most likely ones.

    Args:
        logits: [S, V] float32, before any edit.
        token_ids: [S] int64, the chosen tokens.
        num_top: how many of the most likely tokens; more than the vocabulary means all of it.
    """
    # Subtracting the sum from the few logits reported spares a [S, V] log_softmax.
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    top = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    return Logprobs(
        chosen=(logits.gather(-1, token_ids[:, None]) - log_total).squeeze(-1),
        top_token_ids=top.indices,
        top=top.values - log_total,
    )
