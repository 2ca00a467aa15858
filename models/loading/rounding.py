"""Rounds the weights of a plain checkpoint to FP8 while it loads, with one scale per row."""

from typing import cast

import torch
from torch import nn

from models.layers.experts import Experts
from models.layers.quantization import QuantizableLinear, fits_fp8
from models.layers.weight import LoadsWeights, ShardId
from models.loading.dequantize import round_to_fp8
from models.loading.names import Destination


class RoundsToFP8:
    """Fills the FP8 weight and the scales of a layer from one plain tensor at a time."""

    def __init__(self, layer: LoadsWeights) -> None:
        self.layer = layer

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Rounds `loaded`, and copies this rank's share of values and scales."""
        values, scale = round_to_fp8(loaded)
        layer = cast("nn.Module", self.layer)
        name = next(name for name, each in layer.named_parameters() if each is param)
        self.layer.weight_loader(param, values, shard_id)
        self.layer.weight_loader(layer.get_parameter(f"{name}_scale"), scale, shard_id)


def is_rounded(destination: Destination, values: torch.Tensor) -> bool:
    """Returns whether a tensor is a matrix of a layer or an expert that FP8 products could use."""
    layer, param = destination.layer, destination.param
    if values.dim() != 2:
        return False
    if isinstance(layer, QuantizableLinear):
        return param is layer.weight and fits_fp8(layer, None)
    return isinstance(layer, Experts) and (param is layer.gate_up_proj or param is layer.down_proj)
