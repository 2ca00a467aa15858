"""The embedding of the tokens that one of several ranks holds: octavo::local_embedding."""

import torch
from torch.nn import functional

from models.kernels.gpu import has_kernels
from models.ops.custom_op import operator


@operator(lambda token_ids, weight, **_: weight.new_empty((*token_ids.shape, weight.shape[1])))
def local_embedding(token_ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Returns the vectors of a run of token ids, and zeros for all other ids.

    Args:
        token_ids: [T] int32 or int64.
        weight: [N, H], contiguous, the vectors of the run.
        first: the id of its first token.

    Returns:
        [T, H], of the dtype of `weight`.
    """
    if has_kernels(weight.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.elementwise import local_embedding as kernel

        return kernel.local_embedding(token_ids.contiguous(), weight, first)
    local_ids = token_ids - first
    is_foreign = (local_ids < 0) | (local_ids >= weight.shape[0])
    vectors = functional.embedding(local_ids.masked_fill(is_foreign, 0), weight)
    return vectors.masked_fill_(is_foreign.unsqueeze(-1), 0)
