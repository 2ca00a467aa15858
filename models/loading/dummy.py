"""Random weights for benchmarks: the same every time, in a checkpoint's formats."""

import math
import re
from collections.abc import Sequence

import torch
from torch import nn

from models.layers.decoder import CausalLM
from models.layers.experts import Experts
from models.layers.hash_moe import HashRouter
from models.layers.quantization import QuantizableLinear
from models.number_formats import E2M1_VALUES, FP8, FP8_MAX, MXFP4
from models.operands.packed_weights import bits_of, num_columns
from models.operands.run_scales import integer_words

SEED = 0
SLICE_VALUES = 2**24
"""Values drawn at a time for a parameter whose dtype torch cannot draw in."""
FP8_SCALE = 1 / FP8_MAX
"""Scale of FP8 weights, so that values of the whole range become at most one."""
INTEGERS = range(-7, 8)
"""Values of integers of 4 bits. With -8 their mean would not be 0: what all tokens have in common
would grow from layer to layer, and all would choose the same experts."""

BYTES = range(-127, 128)
"""Values of integers of 8 bits."""

_FACTOR = re.compile(r"(norm\w*\.weight|layer_scalar|router\.(per_expert_)?scale)$")
"""Weights of norms and other factors, which are one."""


def fill_with_random_weights(model: CausalLM) -> None:
    """Draws weights that keep activations finite, the same ones every time on one device."""
    filled: set[nn.Parameter] = set()
    for layer in model.modules():
        if isinstance(layer, QuantizableLinear) and layer.method.packing is not None:
            _fill_packed(layer)
            filled.update(layer.parameters())
        elif isinstance(layer, Experts):
            filled.update(_fill_packed_experts(layer))
        elif isinstance(layer, HashRouter):
            generator = torch.Generator(layer.tid2eid.device).manual_seed(SEED)
            layer.tid2eid.random_(0, len(layer.weight), generator=generator)
            filled.add(layer.tid2eid)
    for name, param in model.named_parameters():
        if param in filled:
            continue
        generator = torch.Generator(param.device).manual_seed(SEED)
        if param.dtype == FP8:
            _fill_fp8(param, generator)
        elif name.endswith("_scale") or _FACTOR.search(name):
            param.fill_(1.0 if _FACTOR.search(name) else FP8_SCALE)
        elif param.dim() > 1:
            param.normal_(std=param.shape[-1] ** -0.5, generator=generator)
        else:
            param.fill_(0.0)


def _fill_packed_experts(layer: Experts) -> list[nn.Parameter]:
    """Draws experts of 4 bits, as _fill_packed does; returns their parameters."""
    filled = []
    for weight, scale in (
        (layer.gate_up_proj, layer.gate_up_proj_scale),
        (layer.down_proj, layer.down_proj_scale),
    ):
        if weight.dtype != torch.uint8:
            continue
        assert scale is not None, "weights of 4 bits have scales"
        is_integer = scale.dtype == torch.int32
        number = _draw_packed(weight, is_integer=is_integer)
        if is_integer:
            scale.copy_(integer_words(torch.tensor(number, dtype=torch.bfloat16), None))
        else:
            scale.fill_(_exponent(number) if scale.dtype == MXFP4 else number)
        filled += [weight, scale]
    return filled


def _fill_integers(param: torch.Tensor, generator: torch.Generator) -> None:
    """Draws two of INTEGERS for each byte; 8 stands for 0."""
    count = len(INTEGERS)
    param.random_(0, count**2, generator=generator)
    for part in torch.split(param.view(-1), SLICE_VALUES):
        # From the pair's number to that of either half, plus 1.
        part += part // count + 17


def _fill_packed(layer: QuantizableLinear) -> None:
    """Draws a packed weight, with one scale that gives it the spread of unquantised weights."""
    packing = layer.method.packing
    assert packing is not None, "the caller checked"
    assert layer.weight_scale is not None, "packed weights have scales"
    scale = _draw_packed(layer.weight, is_integer=packing.is_integer)
    layer.weight_scale.fill_(_exponent(scale) if packing.kind == "mxfp4" else scale)
    if layer.weight_zero is not None:
        layer.weight_zero.fill_(0 if packing.kind == "int8" else 8)
    bias = layer._parameters.get("bias")
    if bias is not None:
        bias.fill_(0.0)


def _draw_packed(weight: torch.Tensor, *, is_integer: bool) -> float:
    """Draws numbers of 4 or 8 bits; returns the scale that gives them their spread."""
    generator = torch.Generator(weight.device).manual_seed(SEED)
    values: Sequence[float] = INTEGERS if is_integer else E2M1_VALUES
    if bits_of(weight) == 8:
        values = BYTES
        weight.random_(BYTES.start, BYTES.stop, generator=generator)
    elif is_integer:
        _fill_integers(weight, generator)
    else:
        weight.random_(0, 256, generator=generator)
    return float(num_columns(weight) ** -0.5 / _spread(values))


def _exponent(scale: float) -> int:
    """Returns the scale of MXFP4 that is next to one."""
    return 127 + round(math.log2(scale))


def _spread(values: Sequence[float]) -> float:
    """Returns the standard deviation, around zero, of equally frequent values."""
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _fill_fp8(param: nn.Parameter, generator: torch.Generator) -> None:
    std = param.shape[-1] ** -0.5 / FP8_SCALE
    for part in torch.split(param.view(-1), SLICE_VALUES):
        drawn = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        drawn.normal_(std=std, generator=generator)
        part.copy_(drawn.clamp_(-FP8_MAX, FP8_MAX))
