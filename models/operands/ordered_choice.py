"""The choice of an index in batch-invariant mode."""

import torch


def ordered_choice(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the numbers of the highest scores of each row in rising order, [..., count].

    Of equal scores the first ones are taken, so the choice depends on the row's scores alone.
    """
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return best.sort(dim=-1).values
