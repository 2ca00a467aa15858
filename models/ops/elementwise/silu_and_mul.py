"""The gate of a SwiGLU feed-forward layer."""

import torch
from torch.nn import functional

from models.ops.kernel_choice import runs_as_kernel


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up of [..., 2 * I] that holds gate, then up: [..., I].

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """
    if runs_as_kernel(x):
        from models.ops.triton.elementwise import silu_and_mul as kernel

        return kernel.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
