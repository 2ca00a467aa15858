"""Rotation of neighbouring elements at the end of a vector."""

import torch


def turn_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the last P elements of x, [..., D], whose neighbours form pairs.

    cos, sin: [..., P / 2] of each pair; their other sizes broadcast to those of x.
    """
    plain, turned = x.tensor_split([x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    first, second = turned.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((plain, pairs.flatten(-2).to(x.dtype)), dim=-1)
