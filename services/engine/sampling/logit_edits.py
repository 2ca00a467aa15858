"""Changes to logits before a token is chosen: penalties, logit bias, forbidden end tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.sampling.penalties import Penalties, apply_penalties


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBias:
    """Numbers to add to single logits of E rows.

    token_ids: [E, n] integers. values: [E, n] float32; padding is 0 on any token.
    """

    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """The E of a batch's S rows whose logits change, and how.

    indices: [E] int64, which rows of the batch.
    penalties: absent when none of the rows has any.
    biases: what is added after the penalties; -inf forbids a token.
    """

    indices: Tensor
    penalties: Penalties | None
    biases: tuple[TokenBias, ...]


def edit_logits(logits: Tensor, edits: LogitEdits) -> Tensor:
    """Returns a copy of the logits [S, V] float32 with the edits applied to its rows."""
    edited = logits.index_select(0, edits.indices)
    if edits.penalties is not None:
        edited = apply_penalties(edited, edits.penalties)
    for bias in edits.biases:
        edited = edited.scatter_add(1, bias.token_ids.long(), bias.values)
    return torch.index_copy(logits, 0, edits.indices, edited)
