"""Changes to logits before sampling: logit bias, forbidden end tokens, penalties.

Biases come first, as in vLLM and transformers: a repetition penalty multiplies the biased logit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.ops.sampling.penalize_tokens import Penalties, penalize_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Changes to the logits of E of a batch's S rows.

    indices: [E] int64, which rows of the batch.
    penalties: absent when none of the rows has any.
    biases: pairs of token_ids, [E, n] integers, and values, [E, n] float32, to add before the
        penalties; -inf forbids a token. Padding adds 0 to any token.
    """

    indices: Tensor
    penalties: Penalties | None
    biases: tuple[tuple[Tensor, Tensor], ...]


def edit_logits(logits: Tensor, edits: LogitEdits, *, in_place: bool = False) -> Tensor:
    """Returns the logits [S, V] as float32 with the edits applied to their rows.

    Args:
        logits: [S, V].
        edits: the changes.
        in_place: overwrites contiguous float32 logits instead of a copy.
    """
    edited = logits.to(torch.float32, copy=not in_place).contiguous()
    row_starts = edits.indices[:, None] * logits.shape[1]
    for token_ids, values in edits.biases:
        at = (row_starts + token_ids).flatten()
        edited.view(-1).scatter_add_(0, at, values.flatten())
    if edits.penalties is not None:
        penalize_tokens(edited, edits.indices, edits.penalties)
    return edited
