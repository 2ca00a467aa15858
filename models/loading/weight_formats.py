"""Sums up which weights are stored, kept and computed in which format."""

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from models.layers.decoder import CausalLM, WeightFormat
from models.layers.experts import Experts
from models.layers.quantization import QuantizableLinear
from models.layers.weight import described_weight
from models.loading.plan import Load
from models.number_formats import FP8, MXFP4

RANDOM = "random"
"""Stored format of weights that no checkpoint has."""


def weight_formats(loads: Sequence[Load], model: CausalLM) -> tuple[WeightFormat, ...]:
    """Returns one entry for each pair of a stored and a kept format, largest first.

    Embedding, head, routers, norms and biases count too. Scales count with their weights.
    """
    stored: dict[nn.Parameter, set[str]] = defaultdict(set)
    for load in loads:
        stored[load.destination.param].add(load.stored_as)
    totals: dict[tuple[str, str, bool], list[int]] = defaultdict(lambda: [0, 0])
    seen: set[nn.Parameter] = set()
    for layer in model.modules():
        for name, param in layer.named_parameters(recurse=False):
            if param in seen:
                continue
            seen.add(param)
            weight = layer.get_parameter(described_weight(layer, name))
            kept, rounds = _kept_format(layer, weight)
            entry = totals[" and ".join(sorted(stored[weight])) or RANDOM, kept, rounds]
            entry[0] += param is weight
            entry[1] += param.nbytes
    formats = [
        WeightFormat(stored=key[0], kept=key[1], rounds_activations=key[2], count=count, bytes=size)
        for key, (count, size) in totals.items()
    ]
    return tuple(sorted(formats, key=lambda each: -each.bytes))


def _kept_format(layer: nn.Module, weight: nn.Parameter) -> tuple[str, bool]:
    """Returns the format of a weight on its device, and whether its product rounds activations."""
    if isinstance(layer, QuantizableLinear) and weight is layer.weight:
        kept_as = layer.method.kept_as
        if kept_as is not None:
            return kept_as, weight.dtype == FP8
    if isinstance(layer, Experts) and weight.dtype in (FP8, MXFP4):
        if weight.dtype == MXFP4:
            return ("mxfp4" if layer.packing is None else layer.packing.describe()), False
        scale = layer.down_proj_scale
        is_by_row = scale is not None and scale.shape[1:] == (layer.down_proj.shape[1], 1)
        return ("fp8 rows" if is_by_row else "fp8 blocks of 128 x 128"), True
    return str(weight.dtype).removeprefix("torch."), False
