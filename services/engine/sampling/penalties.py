"""Penalties on tokens that a sequence already holds."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of E rows and the tokens they look at.

    history: [E, L] integers, tokens of each sequence; columns from its length on are ignored.
    seq_lens, num_prompt_tokens: [E] integers, tokens known, and how many of them are the prompt.
    repetition, frequency, presence: [E] float32; 1, 0 and 0 change nothing.
    """

    history: Tensor
    seq_lens: Tensor
    num_prompt_tokens: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def apply_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    """Returns the logits [E, V] with tokens made less likely that were seen before.

    Repetition divides positive and multiplies negative logits of tokens in prompt or output
    (Keskar et al. 2019, "CTRL", section 4.1). Frequency and presence subtract for tokens in the
    output alone, by count and once: logit - frequency * count - presence * (count > 0).
    """
    column = torch.arange(penalties.history.shape[1], device=logits.device)
    is_known = column < penalties.seq_lens[:, None]
    is_output = is_known & (column >= penalties.num_prompt_tokens[:, None])
    history = penalties.history.long()
    seen = _count(history, is_known, logits) > 0
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    counts = _count(history, is_output, logits)
    logits = logits - penalties.frequency[:, None] * counts
    return logits - penalties.presence[:, None] * (counts > 0)


def _count(history: Tensor, counted: Tensor, logits: Tensor) -> Tensor:
    """Returns how often each row's history holds each token where `counted`, as [E, V] float32."""
    # Columns behind a sequence hold tokens of the row's earlier owners: valid ids, weight 0.
    return torch.zeros_like(logits).scatter_add_(1, history, counted.to(logits.dtype))
