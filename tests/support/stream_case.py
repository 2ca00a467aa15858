"""A product into a residual stream and the product after it, for operators that fuse them."""

from dataclasses import dataclass, fields, replace

import torch

from models.ops.elementwise.rms_norm import add_rms_norm, rms_norm
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.linear import linear
from models.ops.products.linear_residual import (
    linear_residual,
    linear_residual_norm,
    linear_residual_norm_linear,
)
from models.ops.products.norm_linear import gated_linear, norm_linear

EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCase:
    """T tokens of a stream of H features; x has K of them, the product after the norm N.

    residual: [T, H].
    x: [T, K].
    weight, bias: [H, K] and [H], or None.
    norm_weight: [H].
    next_weight, next_bias: [N, H] and [N], or None; with a gate twice as many rows.
    is_gated: whether the product after the norm has a gate.
    """

    residual: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm_weight: torch.Tensor
    next_weight: torch.Tensor
    next_bias: torch.Tensor | None
    is_gated: bool

    def exact(self) -> "StreamCase":
        """Returns the case in float64 on the CPU."""

        tensors = {
            field.name: value.cpu().double()
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **tensors)

    def fused(self, operator: str) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Runs one operator on a copy of the stream; returns its output and the stream."""
        case = replace(self, residual=self.residual.clone())
        return case.fused_in_place(operator), case.residual

    def fused_in_place(self, operator: str) -> torch.Tensor | None:
        """Runs one operator on the stream itself; returns its output."""
        return _FUSED[operator](self)

    def unfused(self, operator: str) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Computes the same by the operators that layers call."""
        return _UNFUSED[operator](self)

    def next_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product after the norm, of x."""
        product = linear(x, self.next_weight, self.next_bias)
        return silu_and_mul(product) if self.is_gated else product

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm of x."""
        return rms_norm(x, self.norm_weight, EPS)

    @property
    def total(self) -> torch.Tensor:
        """The stream with the first product added."""
        return self.residual + linear(self.x, self.weight, self.bias)


def _fused_add(case: StreamCase) -> torch.Tensor:
    return add_rms_norm(case.residual.flip(0), case.residual, case.norm_weight, EPS)


def _unfused_add(case: StreamCase) -> tuple[torch.Tensor, torch.Tensor]:
    total = case.residual + case.residual.flip(0)
    return case.normed(total), total


_FUSED = {
    "gated_linear": lambda case: gated_linear(case.residual, case.next_weight, case.next_bias),
    "norm_linear": lambda case: norm_linear(
        case.residual, case.norm_weight, EPS, case.next_weight, case.next_bias, case.is_gated
    ),
    "add_rms_norm": _fused_add,
    "linear_residual": lambda case: linear_residual(
        case.residual, case.x, case.weight, case.bias
    ),
    "linear_residual_norm": lambda case: linear_residual_norm(
        case.residual, case.x, case.weight, case.bias, case.norm_weight, EPS
    ),
    "linear_residual_norm_linear": lambda case: linear_residual_norm_linear(
        case.residual, case.x, case.weight, case.bias, case.norm_weight, EPS,
        case.next_weight, case.next_bias, case.is_gated,
    ),
}  # fmt: skip
_UNFUSED = {
    "gated_linear": lambda case: (case.next_of(case.residual), case.residual),
    "norm_linear": lambda case: (case.next_of(case.normed(case.residual)), case.residual),
    "add_rms_norm": _unfused_add,
    "linear_residual": lambda case: (None, case.total),
    "linear_residual_norm": lambda case: (case.normed(case.total), case.total),
    "linear_residual_norm_linear": lambda case: (
        case.next_of(case.normed(case.total)), case.total,
    ),
}  # fmt: skip

OPERATORS = tuple(_FUSED)


def make_stream_case(
    num_tokens, num_hidden, num_inputs, num_outputs, *,
    has_bias=False, is_gated=False, dtype=torch.bfloat16, device="cpu", seed=0,
):  # fmt: skip
    """Draws a case; has_bias gives both products one."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    num_rows = num_outputs * (2 if is_gated else 1)
    case = StreamCase(
        residual=draw(num_tokens, num_hidden),
        x=draw(num_tokens, num_inputs),
        weight=draw(num_hidden, num_inputs, scale=num_inputs**-0.5),
        bias=draw(num_hidden) if has_bias else None,
        norm_weight=draw(num_hidden),
        next_weight=draw(num_rows, num_hidden, scale=num_hidden**-0.5),
        next_bias=draw(num_rows) if has_bias else None,
        is_gated=is_gated,
    )
    if case.x.is_cuda:
        # Kernels read weights while those before them finish: a model's were written long ago.
        torch.cuda.synchronize()
    return case
