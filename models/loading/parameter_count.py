"""Counts a model's parameters, independent of the format of its weights."""

from torch import nn

from models.number_formats import MXFP4

MXFP4_PER_BYTE = 2


def count_parameters(model: nn.Module) -> int:
    """Returns the number of the model's weights, as on its model card.

    A packed byte holds two. Scales of quantised weights do not count. Of a model shared among ranks
    it counts this rank's part.
    """
    count = 0
    for name, parameter in model.named_parameters():
        if not name.endswith("_scale"):
            is_packed = parameter.dtype == MXFP4
            count += parameter.numel() * (MXFP4_PER_BYTE if is_packed else 1)
    return count
