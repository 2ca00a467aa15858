"""The gate of an expert, on accumulators."""

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, alpha, limit, IS_CLAMPED: tl.constexpr):
    """Computes models.ops.experts.moe.gated of float32 gate and up."""
    if IS_CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        if IS_CLAMPED == 1:
            up = up + 1.0
        return gate * tl.sigmoid(alpha * gate) * up
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return gate * tl.sigmoid(gate) * up
