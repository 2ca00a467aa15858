"""The scales of activations that are rounded to FP8."""

import torch

TOKEN_ALIGNMENT = 4
"""Scales of a group begin at a multiple of this many: the copy engine needs 16 bytes."""


def empty_token_scales(num_tokens: int, num_groups: int, device: torch.device) -> torch.Tensor:
    """Returns room for scales [T, groups] float32, with those of a group side by side.

    The copy engine then loads one group's of many tokens at once.
    """
    stride = -(-num_tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT
    scales = torch.empty(num_groups, stride, dtype=torch.float32, device=device)
    return scales[:, :num_tokens].t()
