"""Forbids tokens by packed bits."""

import torch
from torch import Tensor

from models.kernels.gpu import has_kernels


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Sets the logits of tokens whose bit is 0 to minus infinity, in G rows, in place.

    Args:
        logits: [S, V] float32, contiguous.
        rows: [G] int32, distinct rows of the logits.
        bits: [G, ceil(V / 32)] int32, contiguous; token t is bit t % 32 of word t // 32.
    """
    if has_kernels(logits.device):
        from models.kernels.sampling import mask_tokens as kernel

        kernel.mask_tokens(logits, rows, bits)
        return
    token = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (bits.index_select(1, token // 32) >> (token % 32)) & 1
    masked = logits.index_select(0, rows).masked_fill_(is_allowed == 0, -torch.inf)
    logits.index_copy_(0, rows.long(), masked)
