"""Replaces layers of transformers' networks by ours where both compute the same."""

import copy
import re

import torch
from torch import nn
from torch.nn import functional

from models.layers.linear import RowParallelLinear
from models.layers.norm import RMSNorm
from models.parallel.group import SINGLE

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_TOLERANCE = 1e-6


class FlatLinear(RowParallelLinear):
    """A projection of [..., K], computed over all tokens at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [..., K] to [..., N]."""
        return super().forward(x.flatten(0, -2)).view(*x.shape[:-1], -1)


class FlatRMSNorm(RMSNorm):
    """A norm of [..., K], computed over all rows at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x, of its shape and dtype."""
        return super().forward(x.flatten(0, -2)).view(x.shape)


def use_own_layers(network: nn.Module) -> None:
    """Replaces plain products and root-mean-square norms; parameters stay shared as they were."""
    for path, module in list(network.named_modules()):
        own = _own(module)
        if own is not None:
            network.set_submodule(path, own)


def _own(module: nn.Module) -> nn.Module | None:
    """Returns our layer for one of a network; None if there is none."""
    if type(module) is nn.Linear:
        rows, columns = module.weight.shape
        linear = FlatLinear(columns, rows, bias=module.bias is not None, group=SINGLE)
        linear.weight, linear.bias = module.get_parameter("weight"), module._parameters["bias"]
        return linear
    eps = next((getattr(module, n) for n in _EPS_NAMES if hasattr(module, n)), None)
    is_norm = re.search(r"RMSNorm$", type(module).__name__) is not None
    if is_norm and isinstance(eps, float) and _computes_rms_norm(module, eps):
        weight = module.get_parameter("weight")
        norm = FlatRMSNorm(len(weight), eps)
        norm.weight = weight
        return norm
    return None


def _computes_rms_norm(module: nn.Module, eps: float) -> bool:
    """Returns whether a module divides by the root mean square and multiplies by its weight."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or module.get_parameter("weight").dim() != 1:
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    size = module.get_parameter("weight").shape[0]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    weight, x = draw(size), draw(1, 3, size)
    trial = copy.copy(module)
    trial._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        computed = trial(x)
    except (RuntimeError, TypeError):
        return False
    expected = functional.rms_norm(x, (size,), weight, eps)
    return torch.allclose(computed, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
