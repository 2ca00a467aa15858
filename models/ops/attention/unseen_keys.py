"""Hides a block's former content from the request that has the block now."""

import torch
from torch import Tensor


def clear_unseen(gathered: Tensor, mask: Tensor, block_size: int) -> None:
    """Zeroes, in place, the slots after the last key that a query sees, in that key's block.

    A mask is not enough: 0 * NaN and inf - inf are NaN. The kernels do not load such keys; the
    references gather whole blocks. Later blocks are the null block, which no request writes.

    gathered: [G, L, ...] contiguous, the blocks of each of G requests; L is a multiple of
        block_size.
    mask: [G, 1, Q, L] bool, keys that each query sees; the last query sees them all.
    """
    num_requests = gathered.shape[0]
    num_keys = mask[:, 0, -1].sum(-1)
    last = torch.div(num_keys - 1, block_size, rounding_mode="floor")
    blocks = gathered.view(num_requests, -1, block_size, gathered[0, 0].numel())
    requests = torch.arange(num_requests, device=gathered.device)
    slots = torch.arange(block_size, device=gathered.device) + (last * block_size)[:, None]
    is_unseen = slots >= num_keys[:, None]
    blocks[requests, last] = blocks[requests, last].masked_fill_(is_unseen[..., None], 0)
