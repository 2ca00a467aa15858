"""The keys that each query sees, for the reference: a window, and later tokens of an image."""

import torch

from models.forward_context import AttentionGroup


def seen_keys(
    group: AttentionGroup, window: int | None, key_ends: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns which keys the queries of a group see, [G, 1, Q, L] bool.

    A query sees the keys of its window, as in unified_attention_with_output, or all up to its own,
    and those before its entry in key_ends, [T] of the step.
    """
    mask = group.mask
    keys = torch.arange(mask.shape[-1], device=mask.device)
    if key_ends is not None:
        mask = keys < key_ends[group.tokens].view(*mask.shape[:-1], 1)
    if window is None:
        return mask
    num_keys = group.mask.sum(-1, keepdim=True)
    first = num_keys - window
    if window < 0:
        first = (num_keys - 1).div(-window, rounding_mode="floor") * -window
    return mask & (keys >= first)
