"""Random weights for benchmarks: the same every time, in a checkpoint's formats."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from models.layers.decoder import CausalLM
from models.layers.quantization import QuantizableLinear
from models.number_formats import E2M1_VALUES, FP8, FP8_MAX, MXFP4
from models.ops.operands.run_scales import COLUMNS, integer_words

SEED = 0
SLICE_VALUES = 2**24
"""Values drawn at a time for a parameter whose dtype torch cannot draw in."""
FP8_SCALE = 1 / FP8_MAX
"""Scale of FP8 weights, so that values of the whole range become at most one."""
INTEGERS = range(-7, 8)
"""Values of integers of 4 bits. With -8 their mean would not be 0: what all tokens have in common
would grow from layer to layer, and all would choose the same experts."""


def fill_with_random_weights(model: CausalLM) -> None:
    """Draws weights that keep activations finite, the same ones every time on one device."""
    packed = [
        layer
        for layer in model.modules()
        if isinstance(layer, QuantizableLinear) and layer.method.packing is not None
    ]
    of_packed = {param for layer in packed for param in layer.parameters()}
    for layer in packed:
        _fill_packed(layer)
    named = dict(model.named_parameters())
    words = [name for name, param in named.items() if param.dtype == torch.int32]
    of_integers = {name.removesuffix("_scale") for name in words}
    for name, param in named.items():
        if param in of_packed:
            continue
        generator = torch.Generator(param.device).manual_seed(SEED)
        if param.dtype == FP8:
            _fill_fp8(param, generator)
        elif param.dtype == torch.int32:
            _fill_words(param)
        elif name in of_integers:
            _fill_integers(param, generator)
        elif param.dtype == MXFP4:
            _fill_mxfp4(name, param, generator)
        elif name.endswith("_scale"):
            param.fill_(FP8_SCALE)
        elif param.dim() > 1:
            param.normal_(std=param.shape[-1] ** -0.5, generator=generator)
        else:
            param.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def _fill_mxfp4(name: str, param: nn.Parameter, generator: torch.Generator) -> None:
    """Draws packed values, and scales that give them the spread of unquantised weights."""
    if not name.endswith("_scale"):
        param.random_(0, 256, generator=generator)
        return
    row_size = param.shape[1] * COLUMNS
    param.fill_(127 + round(math.log2(row_size**-0.5 / _spread(E2M1_VALUES))))


def _fill_words(param: nn.Parameter) -> None:
    """Gives integers of experts one scale, as _fill_packed does, and the zero point 8."""
    scale = (param.shape[1] * COLUMNS) ** -0.5 / _spread(INTEGERS)
    param.copy_(integer_words(torch.tensor(scale, dtype=torch.bfloat16), None))


def _fill_integers(param: torch.Tensor, generator: torch.Generator) -> None:
    """Draws two of INTEGERS for each byte; 8 stands for 0."""
    count = len(INTEGERS)
    param.random_(0, count**2, generator=generator)
    for part in torch.split(param.view(-1), SLICE_VALUES):
        # From the pair's number to that of either half, plus 1.
        part += part // count + 17


def _fill_packed(layer: QuantizableLinear) -> None:
    """Draws a weight of 4 bits, with one scale that gives it the spread of unquantised weights."""
    packing = layer.method.packing
    assert packing is not None, "the caller checked"
    assert layer.weight_scale is not None, "packed weights have scales"
    generator = torch.Generator(layer.weight.device).manual_seed(SEED)
    if packing.kind == "int4":
        values: Sequence[float] = INTEGERS
        _fill_integers(layer.weight, generator)
    else:
        values = E2M1_VALUES
        layer.weight.random_(0, 256, generator=generator)
    scale = (2 * layer.weight.shape[1]) ** -0.5 / _spread(values)
    if packing.kind == "mxfp4":
        layer.weight_scale.fill_(127 + round(math.log2(scale)))
    else:
        layer.weight_scale.fill_(1.0 if layer.weight_outer_scale is not None else scale)
    if layer.weight_outer_scale is not None:
        layer.weight_outer_scale.fill_(scale)
    if layer.weight_zero is not None:
        layer.weight_zero.fill_(8)
    bias = layer._parameters.get("bias")
    if bias is not None:
        bias.fill_(0.0)


def _spread(values: Sequence[float]) -> float:
    """Returns the standard deviation, around zero, of equally frequent values."""
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _fill_fp8(param: nn.Parameter, generator: torch.Generator) -> None:
    std = param.shape[-1] ** -0.5 / FP8_SCALE
    for part in torch.split(param.view(-1), SLICE_VALUES):
        drawn = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        drawn.normal_(std=std, generator=generator)
        part.copy_(drawn.clamp_(-FP8_MAX, FP8_MAX))
