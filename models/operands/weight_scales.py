"""The scales of FP8 weights."""

import torch


def is_by_block(weight: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Returns whether a weight [N, K] has scales by block of 128 x 128, [N / 128, K / 128].

    Otherwise they are by row, [N, 1], or there are none.
    """
    return scale is not None and scale.shape != (weight.shape[0], 1)
