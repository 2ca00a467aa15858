"""Gates and normalised keys of recurrent states."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Returns log(1 + e^x), as torch does from 20 on x."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def log_decay(rate, gate, FLOOR: tl.constexpr):
    """Returns the logarithm of a decay: rate * softplus(gate), or FLOOR * sigmoid(-rate * gate).

    FLOOR: the least logarithm; 0 for none.
    """
    return rate * softplus(gate) if FLOOR == 0.0 else FLOOR * sigmoid(-rate * gate)


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def normalised(x, axis: tl.constexpr):
    """Returns vectors along an axis, divided by their lengths."""
    total = tl.sum(x * x, axis, keep_dims=True)
    return x * tl.rsqrt(total + 1e-6)
