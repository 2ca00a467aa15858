"""Counts a model's parameters, independent of the format of its weights."""

from dataclasses import replace

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.weight import described_weight
from models.loading.without_storage import WithoutStorage
from models.parallel.group import SINGLE
from models.registry import model_class

PER_BYTE = 2
"""Values of 4 bits in a byte."""


def count_parameters(model: nn.Module) -> int:
    """Returns the number of the model's weights, as on its model card.

    A packed byte holds two. Scales and zero points of quantised weights do not count. Of a model
    shared among ranks it counts this rank's part.
    """
    count = 0
    for name, parameter in model.named_parameters():
        path, _, own_name = name.rpartition(".")
        if described_weight(model.get_submodule(path), own_name) == own_name:
            is_packed = parameter.dtype == torch.uint8
            count += parameter.numel() * (PER_BYTE if is_packed else 1)
    return count


def count_whole(config: ModelConfig) -> int:
    """Returns the number of weights of all ranks' model, which one of Octavo's classes runs."""
    # Rotary tables have a row for each position, and no weights.
    config = replace(config, max_position_embeddings=1)
    # Other operations on the meta device would import sympy, which takes 1 s (torch 2.11, 2.13).
    with WithoutStorage(), torch.no_grad():
        return count_parameters(model_class(config.architecture)(config, SINGLE))
