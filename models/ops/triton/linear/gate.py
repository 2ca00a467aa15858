"""The gate at the end of a product's kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def gated(gate, up, dtype: gl.constexpr, ROUNDS: gl.constexpr):
    """Returns silu(gate) * up of float32 sums.

    ROUNDS: as silu_and_mul computes it from sums that were rounded to `dtype`.
    """
    if ROUNDS:
        gate = gate.to(dtype).to(gl.float32)
        return gate * (1 / (1 + gl.exp(-gate))) * up.to(dtype).to(gl.float32)
    return gate / (1.0 + gl.exp(-gate)) * up
