"""Log-probabilities of chosen and most likely tokens."""

from dataclasses import dataclass

from torch import Tensor

from models.ops.sampling.top_logprobs import top_logprobs


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
        logits: [S, V], before any edit.
        token_ids: [S] int64, the chosen tokens.
        num_top: how many of the most likely tokens; more than the vocabulary means all of it.
    """
    num_top = min(num_top, logits.shape[-1])
    chosen, top_token_ids, top = top_logprobs(logits, token_ids, num_top)
    return Logprobs(chosen=chosen, top_token_ids=top_token_ids, top=top)
