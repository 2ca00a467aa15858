"""How many parameters a model has, in whatever form its weights are kept."""

from torch import nn

from models.number_formats import MXFP4

NUMBERS_PER_MXFP4_BYTE = 2


def count_parameters(model: nn.Module) -> int:
    """Returns how many numbers the model's weights stand for, as its model card would.

    A packed byte holds two. Scales of quantised weights are part of how those are written down and
    do not count. Of a model shared among ranks it is this rank's part.
    """
    count = 0
    for name, parameter in model.named_parameters():
        if not name.endswith("_scale"):
            is_packed = parameter.dtype == MXFP4
            count += parameter.numel() * (NUMBERS_PER_MXFP4_BYTE if is_packed else 1)
    return count
