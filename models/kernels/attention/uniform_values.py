"""Values that are equal in all threads of a program, in registers that a warp's threads share."""

import triton
import triton.language as tl


@triton.jit
def uniform(x, SHARES: tl.constexpr):
    """Returns the int32 scalar x as it is; with SHARES in a register of the warp.

    The assembler gives a value read from memory, and all that is computed from it, a register of
    each thread. It knows that a reduction over a warp has one result. All threads must get here.
    """
    if SHARES:
        # Impure, so that it stays out of branches that some threads take.
        return tl.inline_asm_elementwise(
            "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return x
