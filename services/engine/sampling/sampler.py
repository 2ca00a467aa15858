"""From logits to tokens, for all rows of a batch at once, after the logit edits."""

from dataclasses import dataclass

from torch import Tensor

from models.ops.sampling.sample_tokens import sample_tokens, where_sound


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """How the tokens of S rows are chosen, all tensors [S].

    temperature, top_p, min_p: float32; temperature 0 is greedy.
    top_k: int64, 0 keeps all.
    seeds: int64. positions: int32, the position the chosen token will take in its sequence.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


def greedy(logits: Tensor) -> Tensor:
    """Returns the most likely token of each row [S, V], the lowest id on a tie, as [S] int64.

    A row whose largest logit is NaN or infinite gets NO_TOKEN.
    """
    largest, token_ids = logits.max(dim=-1)
    return where_sound(largest, token_ids)


def sample(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Draws one token per row; greedy rows get their most likely token.

    Args:
        logits: [S, V], edits applied.
        choice: parameters of each row.

    Returns:
        [S] int64. See models.ops.sampling.sample_tokens for what the truncations keep.
    """
    return sample_tokens(
        logits,
        temperature=choice.temperature,
        top_k=choice.top_k,
        top_p=choice.top_p,
        min_p=choice.min_p,
        seeds=choice.seeds,
        positions=choice.positions,
    )
