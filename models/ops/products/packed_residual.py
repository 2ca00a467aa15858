"""Products with packed weights, added to the residual stream, and the norm of the sum.

octavo::packed_linear_residual_norm. Layers do not call it: a compiler's pass inserts it.
"""

import torch

from models.ops.custom_op import like, operator
from models.ops.elementwise.rms_norm import add_rms_norm
from models.ops.products.packed_linear import packed_addends


@operator(like("residual"), mutates=("residual",))
def packed_linear_residual_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Adds packed_linear to the residual stream in place; returns rms_norm(residual).

    Args:
        residual: [T, N].
        x: [T, K].
        weight: as in packed_linear, and so are its scales, zeros and bias.
        weight_scale: [N, K / group].
        weight_zero: of integers, or None.
        bias: [N].
        norm_weight: [N].
        eps: of the norm.

    Returns:
        [T, N].
    """
    addends = packed_addends(x, weight, weight_scale, weight_zero, bias)
    return add_rms_norm(addends, residual, norm_weight, eps)
