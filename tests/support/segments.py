"""Segments of rows that attend to each other."""

from collections.abc import Sequence

import torch


def bounds_of(lengths: Sequence[int], device: str = "cpu") -> torch.Tensor:
    """Returns the bounds of segments that follow each other, [N, 2] int32."""
    ends = torch.tensor(lengths).cumsum(0)
    bounds = torch.stack((ends - torch.tensor(lengths), ends), dim=1)
    of_row = bounds.repeat_interleave(torch.tensor(lengths), dim=0)
    return of_row.to(torch.int32).to(device)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attends in float64 with a mask of all pairs; returns [N, H * D] of q's dtype."""
    rows = torch.arange(len(q), device=q.device)
    is_seen = (rows >= bounds[:, :1]) & (rows < bounds[:, 1:])
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * scale
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v.double()).flatten(1).to(q.dtype)
