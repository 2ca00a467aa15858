"""Scaling by the sigmoid of a gate: octavo::sigmoid_gate."""

import torch

from models.batch_invariance import row_wise
from models.kernels.gpu import has_kernels
from models.ops.custom_op import like, operator


@operator(like("x"))
def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Returns x * sigmoid(gate), contiguous, like x.

    x: [T, K], gate: [T, K] or [T, 1]; rows may be apart.
    """
    if has_kernels(x.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.elementwise import sigmoid_gate as kernel

        return kernel.sigmoid_gate(x, gate)
    return row_wise(lambda x, gate: x * gate.sigmoid(), x, gate)
