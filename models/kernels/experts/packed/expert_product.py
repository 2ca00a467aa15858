"""One product of a layer's experts of 4 bits, as Hopper's kernels take it."""

from dataclasses import dataclass

import torch

from models.operands.experts import ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """Constants of a product in all kernels.

    num_outputs: inner features, each of a row of gate and one of up, if is_gated; else rows of the
        matrix, which stacks num_parts.
    """

    num_outputs: int
    num_inputs: int
    num_experts: int
    top_k: int
    is_gated: bool
    has_bias: bool
    is_clamped: int
    num_parts: int = 1

    @property
    def constants(self) -> dict[str, int]:
        """Constants of all kernels, under their names there."""
        return {
            "NUM_OUTPUTS": self.num_outputs, "NUM_INPUTS": self.num_inputs,
            "NUM_EXPERTS": self.num_experts, "TOP_K": self.top_k, "IS_GATED": self.is_gated,
            "HAS_BIAS": self.has_bias, "IS_CLAMPED": self.is_clamped,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProduct:
    """Tokens times gate and up, or inner features times down. P pairs of a token and an expert.

    x: [T, H] or [P, I] bfloat16, contiguous.
    ids: [T, top_k] int32, contiguous.
    weight, scale: of models.ops.experts.expert_formats; bias: x stands in for none.
    output: [P, I] or [P, H], which a kernel fills but for pairs of experts that are not here.
    alpha, limit: of the gate.
    """

    shape: ProductShape
    x: torch.Tensor
    ids: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor
    output: torch.Tensor
    alpha: float
    limit: float

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.x.device


def both_products(
    hidden: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights
) -> tuple[ExpertProduct, ExpertProduct]:
    """Returns the product with gate and up, and that with down, whose x is the first one's output.

    hidden: [T, H] bfloat16, contiguous.
    """
    assert experts.gate_up_scale is not None, "the weights are of 4 bits"
    assert experts.down_scale is not None, "the weights are of 4 bits"
    between = hidden.new_empty(ids.numel(), experts.inner_size)
    results = hidden.new_empty(ids.numel(), hidden.shape[1])
    gate_up_bias, down_bias = experts.biases_or(hidden)
    gate_up, down = (
        ExpertProduct(
            shape=ProductShape(
                num_outputs=output.shape[1], num_inputs=x.shape[1], num_experts=len(weight),
                top_k=ids.shape[1], is_gated=is_gated,
                has_bias=experts.gate_up_bias is not None, is_clamped=experts.clamp,
            ),
            x=x, ids=ids, weight=weight, scale=scale, bias=bias, output=output,
            alpha=experts.alpha, limit=experts.limit or 0.0,
        )
        for x, weight, scale, bias, output, is_gated in (
            (hidden, experts.gate_up, experts.gate_up_scale, gate_up_bias, between, True),
            (between, experts.down, experts.down_scale, down_bias, results, False),
        )
    )  # fmt: skip
    return gate_up, down


def ungated_product(
    x: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_parts: int = 1,
) -> ExpertProduct:
    """Returns the product of rows of pairs with a matrix of their experts, not gated.

    x: [P, K] bfloat16, contiguous, in the order of the experts. num_parts: that the matrix stacks.
    """
    output = x.new_empty(len(x), weight.shape[1])
    return ExpertProduct(
        shape=ProductShape(
            num_outputs=output.shape[1], num_inputs=x.shape[1], num_experts=len(weight),
            top_k=ids.shape[1], is_gated=False, has_bias=bias is not None, is_clamped=False,
            num_parts=num_parts,
        ),
        x=x, ids=ids, weight=weight, scale=scale, bias=x if bias is None else bias, output=output,
        alpha=1.0, limit=0.0,
    )  # fmt: skip
