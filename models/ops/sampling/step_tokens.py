"""The tokens of a decode step: reads them from the table of sequences and writes the next ones."""

import torch

from models.kernels.gpu import has_kernels
from models.ops.sampling.sample_tokens import where_sound


def last_tokens(
    tokens: torch.Tensor,
    row_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Finds the last token of each of R sequences, and its position.

    tokens: [rows, length] int32, by row and position.
    row_ids, seq_lens: [R] int32, each sequence's row and length, at least 1.
    input_ids, positions: [R] int32 and int64, overwritten with the tokens and positions.
    """
    if has_kernels(tokens.device):
        from models.kernels.sampling import step_tokens as kernel

        kernel.last_tokens(tokens, row_ids, seq_lens, input_ids, positions)
        return
    torch.sub(seq_lens, 1, out=positions)
    input_ids.copy_(tokens[row_ids, positions])


def choose_greedily(
    logits: torch.Tensor, tokens: torch.Tensor, row_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Returns the most likely token of each of R rows, [R] int32, and writes it to the table.

    On a tie it is the lowest id. A row whose largest logit is NaN or infinite gets NO_TOKEN, and
    the table gets token 0, as the next step looks it up before the host sees the result.

    logits: [R, V], rows contiguous.
    tokens: [rows, length] int32, changed in place.
    row_ids, positions: [R] int32, where each token goes.
    """
    if has_kernels(logits.device):
        from models.kernels.sampling import step_tokens as kernel

        return kernel.choose_greedily(logits, tokens, row_ids, positions)
    largest, most_likely = logits.max(dim=-1)
    token_ids = where_sound(largest, most_likely).int()
    tokens.index_put_((row_ids, positions), token_ids.clamp(min=0))
    return token_ids
