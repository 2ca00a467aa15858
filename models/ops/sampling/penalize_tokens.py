"""Penalties on tokens that a sequence already holds."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.kernels.gpu import has_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of E sequences and the tokens that they apply to.

    tokens: [R, L] int32, a table with a sequence in each row; columns contiguous.
    row_ids: [E] int32, each sequence's row.
    seq_lens: [E] int32, tokens of each sequence, at most L.
    num_prompt_tokens: [E] int64, how many of them are the prompt.
    repetition, frequency, presence: [E] float32; 1, 0 and 0 change nothing.

    All but the table are contiguous.
    """

    tokens: Tensor
    row_ids: Tensor
    seq_lens: Tensor
    num_prompt_tokens: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def penalize_tokens(logits: Tensor, indices: Tensor, penalties: Penalties) -> None:
    """Makes tokens that were seen before less likely, in E rows of the logits, in place.

    Repetition divides positive and multiplies negative logits of tokens in prompt or output (Keskar
    et al. 2019, "CTRL", section 4.1). Frequency and presence apply to tokens in the output: logit -
    frequency * count - presence * (count > 0).

    logits: [S, V] float32, contiguous.
    indices: [E] int64, the distinct rows that `penalties` are of.
    """
    by_sequence = (
        indices,
        penalties.row_ids,
        penalties.seq_lens,
        penalties.num_prompt_tokens,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
    )
    assert all(each.is_contiguous() for each in by_sequence), "kernels read them as arrays"
    if has_kernels(logits.device):
        from models.kernels.sampling import penalize_tokens as kernel

        kernel.penalize_tokens(
            logits,
            indices,
            penalties.tokens,
            penalties.row_ids,
            penalties.seq_lens,
            penalties.num_prompt_tokens,
            penalties.repetition,
            penalties.frequency,
            penalties.presence,
        )
        return
    column = torch.arange(penalties.tokens.shape[1], device=logits.device)
    is_known = column < penalties.seq_lens[:, None]
    is_output = is_known & (column >= penalties.num_prompt_tokens[:, None])
    history = penalties.tokens.index_select(0, penalties.row_ids).long()
    edited = logits.index_select(0, indices)
    repetition = penalties.repetition[:, None]
    repeated = torch.where(edited > 0, edited / repetition, edited * repetition)
    edited = torch.where(_count(history, is_known, logits) > 0, repeated, edited)
    counts = _count(history, is_output, logits)
    edited = edited - penalties.frequency[:, None] * counts
    logits.index_copy_(0, indices, edited - penalties.presence[:, None] * (counts > 0))


def _count(history: Tensor, counted: Tensor, logits: Tensor) -> Tensor:
    """Returns how often each row's history holds each token where `counted`, as [E, V] float32."""
    # Columns after a sequence hold tokens of the row's earlier owners: valid ids, weight 0.
    counts = logits.new_zeros(len(history), logits.shape[1])
    return counts.scatter_add_(1, history, counted.to(logits.dtype))
