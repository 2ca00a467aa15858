"""Mixture of experts whose gate is a gelu: octavo::gelu_moe."""

import torch

from models.kernels.gpu import has_kernels
from models.operands.experts import ExpertWeights, Routing
from models.ops.custom_op import like, operator
from models.ops.experts.moe import apply_experts, experts_row_wise, route, with_slots


@operator(like("hidden"))
def gelu_moe(  # noqa: PLR0913  # an operator takes no dataclasses
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    expert_scale: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    gate_up_a: torch.Tensor | None = None,
    gate_up_b: torch.Tensor | None = None,
    down_a: torch.Tensor | None = None,
    down_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sends each token through its best experts and adds up their weighted, scaled results.

    Weights are softmax scores that sum to 1, times a scale of each expert. Maps hidden [T, H] and
    router_logits [T, E] to [T, H]. expert_scale: [E]. gate_up: [E, 2 * I, H]. down: [E, H, I].
    The others are fields of ExpertAdapters.

    Source: transformers 5.23, models/gemma4.
    """
    routing = Routing(
        top_k=top_k, is_sigmoid=False, is_normed=True, scaling=1.0, num_groups=1, top_groups=1
    )
    experts = ExpertWeights(
        gate_up=gate_up,
        down=down,
        is_gelu=True,
        adapters=with_slots(hidden, gate_up_a, gate_up_b, down_a, down_b),
    )
    if has_kernels(hidden.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.experts import moe as kernel

        weights, ids = kernel.route(router_logits, None, routing)
        return kernel.apply_experts(hidden, weights * expert_scale[ids], ids, experts)

    def apply(
        experts: ExpertWeights, hidden: torch.Tensor, router_logits: torch.Tensor
    ) -> torch.Tensor:
        weights, ids = route(router_logits, None, routing)
        return apply_experts(hidden, weights * expert_scale[ids], ids, experts)

    return experts_row_wise(apply, experts, hidden, router_logits)
