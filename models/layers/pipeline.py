"""A pipeline stage's share of a model: its own layers, and nothing in place of the others."""

from collections.abc import Callable

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.attention import Attention
from models.layers.cache_entry import CacheEntry
from models.layers.latent_attention import LatentAttention
from models.layers.state_mixer import StateMixer
from models.parallel.group import ParallelGroup


class PPMissingLayer(nn.Module):
    """A module of another stage. It returns its first input."""

    def forward(self, x: torch.Tensor, *others: object) -> torch.Tensor:
        """Returns x."""
        del others
        return x


def make_layers(
    config: ModelConfig, group: ParallelGroup, make_layer: Callable[[int], nn.Module]
) -> list[nn.Module]:
    """Returns all layers of a model, those of other stages missing.

    Cache entries are numbered within the stage.

    Args:
        config: the model's.
        group: says which stage this is.
        make_layer: makes the layer of a number in the model.

    Raises:
        ValueError: the stages cannot hold the model's layers.
    """
    own = group.stage.layers_of(config.num_hidden_layers)
    layers = [
        make_layer(index) if index in own else PPMissingLayer()
        for index in range(config.num_hidden_layers)
    ]
    num_before = sum(layer < own.start for layer in config.entry_layers)
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, Attention | CacheEntry | LatentAttention | StateMixer):
                module.layer_index -= num_before
    return layers
