"""Root-mean-square normalisation beside a gate: octavo::gated_rms_norm."""

import torch
from torch.nn import functional

from models.batch_invariance import row_wise
from models.kernels.gpu import has_kernels
from models.ops.custom_op import like, operator


@operator(like("x"))
def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    has_silu: bool = True,
    gates_first: bool = False,
) -> torch.Tensor:
    """Returns norm(x) * act(gate), or norm(x * act(gate)): [T, K], contiguous, of x's dtype.

    Groups of elements have norms of their own. All is computed in float32 and rounded once.

    Args:
        x: [T, K].
        gate: [T, K]; rows may be apart.
        weight: [K / G, G], of groups of G elements; or [G], which all groups share.
        eps: added to the mean square.
        has_silu: whether act is silu; else sigmoid.
        gates_first: whether the gate comes before the norm.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7.
    """
    if has_kernels(x.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.elementwise import gated_rms_norm as kernel

        return kernel.gated_rms_norm(
            x.contiguous(), gate, weight, eps, has_silu=has_silu, gates_first=gates_first
        )
    act = functional.silu if has_silu else torch.sigmoid
    size = weight.shape[-1]

    def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        values, factors = x.float(), act(gate.float())
        if gates_first:
            values = values * factors
        groups = values.view(*values.shape[:-1], -1, size)
        scale = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
        normed = (groups * scale * weight.float()).flatten(-2)
        output: torch.Tensor = normed if gates_first else normed * factors
        return output.to(x.dtype)

    return row_wise(gated, x, gate)
