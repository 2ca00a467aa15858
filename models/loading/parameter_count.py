"""Counts a model's parameters, independent of the format of its weights."""

import torch
from torch import nn

from models.layers.weight import described_weight

PER_BYTE = 2
"""Values of 4 bits in a byte."""


def count_parameters(model: nn.Module) -> int:
    """Returns the number of the model's weights, as on its model card.

    A packed byte holds two. Scales and zero points of quantised weights do not count. Of a model
    shared among ranks it counts this rank's part.
    """
    count = 0
    for name, parameter in model.named_parameters():
        own_name = name.rpartition(".")[2]
        if described_weight(own_name) == own_name:
            is_packed = parameter.dtype == torch.uint8
            count += parameter.numel() * (PER_BYTE if is_packed else 1)
    return count
