"""Products before tanh's GELU, of encoders of images: octavo::gelu_linear."""

import torch
from torch.nn import functional

from models.ops.custom_op import operator
from models.ops.products.product_like import product_like


@operator(product_like("x"))
def gelu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Returns gelu(x @ weight^T + bias), approximated by tanh.

    On a GPU cuBLASLt's product adds and activates before it rounds, so that its output is written
    once.

    Args:
        x: [T, K].
        weight: [N, K].
        bias: [N].

    Returns:
        [T, N].
    """
    if x.is_cuda:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")
