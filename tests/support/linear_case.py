"""Random products with what may be fused into them, and their float64 truth.

A weight may be FP8, with scales by row or by block.
"""

from dataclasses import dataclass

import torch

from models.number_formats import BLOCK, FP8
from models.ops.products.fp8_linear import dequantized
from models.ops.products.linear import linear
from models.ops.products.linear_residual import linear_residual
from models.ops.products.norm_linear import gated_linear, norm_linear

EPS = 1e-6

OPTIONS = {
    "plain": {},
    "bias": {"has_bias": True},
    "norm": {"has_norm": True},
    "norm and bias": {"has_norm": True, "has_bias": True},
    "gate": {"is_gated": True},
    "norm and gate": {"has_norm": True, "is_gated": True},
    "gate with bias": {"is_gated": True, "has_bias": True},
    "residual": {"has_residual": True},
    "bias and residual": {"has_bias": True, "has_residual": True},
}


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """Inputs of an operator of models.ops.products."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm_weight: torch.Tensor | None
    residual: torch.Tensor | None
    is_gated: bool
    weight_scale: torch.Tensor | None = None

    def run(self):
        """Runs what the case has through one operator."""
        if self.residual is not None:
            residual = self.residual.clone()
            linear_residual(residual, self.x, self.weight, self.bias, self.weight_scale)
            return residual
        if self.norm_weight is not None:
            return norm_linear(
                self.x, self.norm_weight, EPS, self.weight, self.bias, self.is_gated,
                self.weight_scale,
            )  # fmt: skip
        product = gated_linear if self.is_gated else linear
        return product(self.x, self.weight, self.bias, self.weight_scale)

    def run_vector(self, tiles):
        """Runs the kernel of scalar products with everything fused."""
        from models.kernels.products.vector_linear import vector_linear

        return vector_linear(
            self.x, self.weight, self.bias, tiles, weight_scale=self.weight_scale,
            norm_weight=self.norm_weight, eps=EPS, is_gated=self.is_gated, residual=self.residual,
        )  # fmt: skip

    def run_matrix(self, tiles):
        """Runs the kernel of the tensor cores, which leaves norm and residual to others."""
        from models.kernels.products.matrix_linear import matrix_linear

        output = matrix_linear(self.x, self.weight, self.bias, tiles, is_gated=self.is_gated)
        return output if tiles.splits == 1 else output.sum(0).to(self.x.dtype)

    def run_wide(self, tiles):
        """Runs the kernel of many tokens, which leaves norm and residual to others."""
        from models.kernels.products.wide_linear import wide_linear

        output = wide_linear(self.x, self.weight, tiles, is_gated=self.is_gated)
        return output if tiles.splits == 1 else output.sum(0).to(self.x.dtype)

    def exact(self):
        """Returns what plain float64 arithmetic makes of the same inputs."""

        def double(x):
            return None if x is None else x.double()

        x = double(self.x)
        if self.norm_weight is not None:
            scale = (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
            x = x * scale * double(self.norm_weight)
        weight = double(self.weight)
        if self.weight_scale is not None:
            weight = dequantized(self.weight, self.weight_scale, torch.float32).double()
        output = x @ weight.T
        if self.bias is not None:
            output = output + double(self.bias)
        if self.is_gated:
            gate, up = output.chunk(2, dim=-1)
            output = gate * gate.sigmoid() * up
        return output if self.residual is None else output + double(self.residual)


def make_linear_case(
    num_tokens, num_outputs, num_inputs, *,
    has_bias=False, has_norm=False, is_gated=False, has_residual=False,
    dtype=torch.bfloat16, device="cpu", seed=0, scales=None,
):  # fmt: skip
    """Draws a case whose result has num_outputs features.

    scales: "row" or "block" makes the weight FP8.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    num_rows = num_outputs * (2 if is_gated else 1)
    weight, weight_scale = draw(num_rows, num_inputs, scale=num_inputs**-0.5), None
    if scales is not None:
        blocks = -(-num_rows // BLOCK), -(-num_inputs // BLOCK)
        shape = (num_rows, 1) if scales == "row" else blocks
        weight = (weight.float() * 100).to(FP8)
        weight_scale = (torch.rand(shape, generator=generator, device=device) + 0.5) / 100
    case = LinearCase(
        x=draw(num_tokens, num_inputs),
        weight=weight,
        weight_scale=weight_scale,
        bias=draw(num_rows) if has_bias else None,
        norm_weight=draw(num_inputs) if has_norm else None,
        residual=draw(num_tokens, num_outputs) if has_residual else None,
        is_gated=is_gated,
    )
    if case.x.is_cuda:
        # Kernels read weights while those before them finish: a model's were written long ago.
        torch.cuda.synchronize()
    return case
