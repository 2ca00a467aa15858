"""Mixture of experts without gates, whose activation is a squared ReLU: octavo::squared_moe."""

import torch

from models.operands.experts import ExpertWeights, Routing
from models.ops.custom_op import like, operator
from models.ops.experts.expert_parallel import own_experts
from models.ops.experts.moe import routed_experts, with_slots


@operator(like("hidden"))
def squared_moe(  # noqa: PLR0913  # an operator takes no dataclasses
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    correction_bias: torch.Tensor,
    top_k: int,
    is_normed: bool,
    scaling: float,
    num_groups: int,
    top_groups: int,
    expert_map: torch.Tensor | None = None,
    expert_load: torch.Tensor | None = None,
    is_gathered: bool = False,
    gate_up_a: torch.Tensor | None = None,
    gate_up_b: torch.Tensor | None = None,
    down_a: torch.Tensor | None = None,
    down_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sends each token through its best experts, down(relu(up(x))^2), and adds up the results.

    Maps hidden [T, H] and router_logits [T, E] to [T, H]. up: [E, I, H]. down: [E, H, I]; scales of
    weights in 8 or 4 bits: see models.ops.experts.expert_formats. correction_bias: of
    models.ops.experts.moe.route, with sigmoid scores; then come fields of Routing. expert_map,
    expert_load, is_gathered: of expert_parallel_moe, where a rank has whole experts. The last four
    are fields of ExpertAdapters.

    Source: NVIDIA 2025, "Nemotron 3", section 2.
    """
    routing = Routing(
        top_k=top_k,
        is_sigmoid=True,
        is_normed=is_normed,
        scaling=scaling,
        num_groups=num_groups,
        top_groups=top_groups,
    )
    experts = ExpertWeights(
        gate_up=up,
        down=down,
        gate_up_scale=up_scale,
        down_scale=down_scale,
        is_squared=True,
        num_routed=None if expert_map is None else len(expert_map),
        adapters=with_slots(hidden, gate_up_a, gate_up_b, down_a, down_b),
    )
    if expert_map is None or expert_load is None:
        return routed_experts(hidden, router_logits, correction_bias, routing, experts)
    return own_experts(
        hidden, router_logits, correction_bias, routing, experts, expert_map, expert_load,
        is_gathered=is_gathered,
    )  # fmt: skip
