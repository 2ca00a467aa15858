"""Weights and random numbers inside kernels; see token_weights and uniform in models.ops.sampling.

Launch kernels that call these with `enable_fp_fusion=False`: a fused product and sum rounds once,
and the weights would differ from the reference.
"""

import triton
import triton.language as tl

from models.operands import draws
from models.operands.base_two import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)
_MIN_TEMPERATURE = tl.constexpr(draws.MIN_TEMPERATURE)
_MAX_HALVINGS = tl.constexpr(draws.MAX_HALVINGS)
_MANTISSA = tl.constexpr(2.0**draws.FRACTION_BITS)
_SHIFT = tl.constexpr(draws.WEIGHT_BITS - draws.FRACTION_BITS)
_T1, _T2, _T3, _T4, _T5, _T6 = (tl.constexpr(term) for term in draws.EXP2_TERMS[1:])
_GOLDEN_GAMMA = tl.constexpr(draws.GOLDEN_GAMMA)
_MIX_1 = tl.constexpr(draws.MIX_1)
_MIX_2 = tl.constexpr(draws.MIX_2)
_DROPPED_BITS = tl.constexpr(64 - draws.MANTISSA_BITS)
_UNIT = tl.constexpr(2.0**-draws.MANTISSA_BITS)


@triton.jit
def scale_of(temperature):
    """Returns the halvings of the weight per unit of logit."""
    temperature = tl.maximum(temperature, _MIN_TEMPERATURE)
    return tl.div_rn(tl.full((), _LOG2_E, tl.float32), temperature)


@triton.jit
def weights_at(depths, scale):
    """Returns the int64 weights of tokens `depths` below their row's largest logit."""
    halvings = depths * scale
    halvings = tl.where(halvings < _MAX_HALVINGS, halvings, _MAX_HALVINGS)
    whole = (halvings + 0.5).to(tl.int32)
    rest = whole.to(tl.float32) - halvings
    power = rest * _T6 + _T5
    power = power * rest + _T4
    power = power * rest + _T3
    power = power * rest + _T2
    power = power * rest + _T1
    power = power * rest + 1.0
    mantissa = (power * _MANTISSA).to(tl.int32).to(tl.int64)
    return (mantissa << _SHIFT) >> whole.to(tl.int64)


@triton.jit
def uniform_of(seed, position):
    """Returns a float64 in [0, 1) for a seed and a position."""
    bits = _mix(seed.to(tl.uint64) + _GOLDEN_GAMMA) + position.to(tl.uint64) * _GOLDEN_GAMMA
    return (_mix(bits) >> _DROPPED_BITS).to(tl.int64).to(tl.float64) * _UNIT


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)
