"""The gate at the end of a product's kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_IN_PAIRS = gl.constexpr("""{
    .reg .b32 pair;
    cvt.rn.bf16x2.f32 pair, $3, $2;
    shl.b32 $0, pair, 16;
    and.b32 $1, pair, 0xffff0000;
}""")


@gluon.jit
def rounded_to(values, dtype: gl.constexpr):
    """Returns float32 numbers rounded to `dtype`, as float32.

    The compiler rounds to bfloat16 and back one by one, on the slow unit of exponentials: 8 cycles
    each for a warp.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            _IN_PAIRS, "=&r,=r,r,r", [values], dtype=gl.float32, is_pure=True, pack=2
        )
    return values.to(dtype).to(gl.float32)


@gluon.jit
def gated(gate, up, dtype: gl.constexpr, ROUNDS: gl.constexpr):
    """Returns silu(gate) * up of float32 sums.

    ROUNDS: as silu_and_mul computes it from sums that were rounded to `dtype`.
    """
    if ROUNDS:
        gate = rounded_to(gate, dtype)
        return gate * (1 / (1 + gl.exp(-gate))) * rounded_to(up, dtype)
    return gate / (1.0 + gl.exp(-gate)) * up
