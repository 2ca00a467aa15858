"""The gate of a SwiGLU feed-forward layer: octavo::silu_and_mul."""

import torch
from torch.nn import functional

from models.batch_invariance import row_wise
from models.kernels.gpu import has_kernels
from models.ops.custom_op import operator


@operator(lambda x, **_: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up of [..., 2 * I] that holds gate, then up: [..., I], contiguous.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """
    x = x.contiguous()
    if has_kernels(x.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.elementwise import silu_and_mul as kernel

        return kernel.silu_and_mul(x)
    return row_wise(_gated, x)


def _gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
