"""Mixture of experts that were chosen before: octavo::chosen_moe."""

import torch

from models.kernels.gpu import has_kernels
from models.operands.experts import ExpertWeights
from models.ops.custom_op import like, operator
from models.ops.experts.moe import apply_experts, experts_row_wise, with_slots


@operator(like("hidden"))
def chosen_moe(  # noqa: PLR0913  # an operator takes no dataclasses
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    alpha: float,
    limit: float | None,
    adds_one: bool,
    gate_up_a: torch.Tensor | None = None,
    gate_up_b: torch.Tensor | None = None,
    down_a: torch.Tensor | None = None,
    down_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sends each token through given experts and adds up their weighted results.

    weights: [T, top_k] float32, and ids of experts, [T, top_k] int32 or int64. Others are fields of
    ExpertWeights and ExpertAdapters. Maps hidden [T, H] to [T, H].
    """
    experts = ExpertWeights(
        gate_up=gate_up,
        down=down,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
        alpha=alpha,
        limit=limit,
        adds_one=adds_one,
        adapters=with_slots(hidden, gate_up_a, gate_up_b, down_a, down_b),
    )
    if has_kernels(hidden.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.experts import moe as kernel

        return kernel.apply_experts(hidden, weights, ids.int(), experts)

    def apply(
        experts: ExpertWeights, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        return apply_experts(hidden, weights, ids, experts, rounds_activations=experts.is_fp8)

    return experts_row_wise(apply, experts, hidden, weights, ids)
