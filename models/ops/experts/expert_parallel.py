"""This rank's part of a mixture of experts: octavo::expert_parallel_moe.

All ranks have the same tokens and route all of them. Each computes its own experts; the sum over
the ranks is the layer's result. The rows of data-parallel ranks are gathered before: each rank's
tokens, padded to the most of any rank.
"""

from dataclasses import replace

import torch

from models.batch_invariance import is_batch_invariant, row_wise
from models.forward_context import get_forward_context
from models.kernels.gpu import has_kernels
from models.operands.experts import ExpertAdapters, ExpertWeights, Routing
from models.ops.custom_op import like, operator
from models.ops.experts.moe import apply_experts, experts_row_wise, route, with_slots
from models.ops.ranks.gather_rows import gather_rows
from models.parallel.group import DATA_PARALLEL


@operator(like("hidden"))
def expert_parallel_moe(  # noqa: PLR0913  # an operator takes no dataclasses
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    top_k: int,
    is_sigmoid: bool,
    is_normed: bool,
    scaling: float,
    num_groups: int,
    top_groups: int,
    alpha: float,
    limit: float | None,
    adds_one: bool,
    expert_map: torch.Tensor,
    expert_load: torch.Tensor,
    is_gathered: bool,
    gate_up_a: torch.Tensor | None = None,
    gate_up_b: torch.Tensor | None = None,
    down_a: torch.Tensor | None = None,
    down_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds up the weighted results of this rank's experts, [T, H] like hidden.

    The first 18 arguments are those of `fused_moe`, with weights of this rank's experts only.
    `expert_load` counts the choices of each expert. The schema does not say so: a compiler would
    copy it, and only the host reads it, between steps.

    expert_map: [E, ranks] int32, see models.parallel.expert_placement.
    expert_load: [E] int64.
    is_gathered: whether hidden has the rows of data-parallel ranks, [ranks * T / ranks, H]. The
        forward context says how many of each are tokens; the others are left out.
    gate_up_a, gate_up_b, down_a, down_b: fields of ExpertAdapters, of this rank's experts.
    """
    routing = Routing(
        top_k=top_k,
        is_sigmoid=is_sigmoid,
        is_normed=is_normed,
        scaling=scaling,
        num_groups=num_groups,
        top_groups=top_groups,
    )
    experts = ExpertWeights(
        gate_up=gate_up,
        down=down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
        alpha=alpha,
        limit=limit,
        adds_one=adds_one,
        num_routed=len(expert_map),
        adapters=with_slots(hidden, gate_up_a, gate_up_b, down_a, down_b),
    )
    return own_experts(
        hidden, router_logits, correction_bias, routing, experts, expert_map, expert_load,
        is_gathered=is_gathered,
    )  # fmt: skip


def own_experts(
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    routing: Routing,
    experts: ExpertWeights,
    expert_map: torch.Tensor,
    expert_load: torch.Tensor,
    *,
    is_gathered: bool,
) -> torch.Tensor:
    """Adds up the weighted results of this rank's experts; see expert_parallel_moe."""
    counts = _tokens_across_dp() if is_gathered else None
    if counts is not None and experts.adapters is not None:
        experts = _with_gathered_slots(experts, experts.adapters, len(hidden), len(counts))
    if has_kernels(hidden.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.experts import moe as kernel

        weights, ids = kernel.route(
            router_logits,
            correction_bias,
            routing,
            expert_map,
            expert_load,
            len(experts.down),
            counts,
        )
        return kernel.apply_experts(hidden, weights, ids, experts)
    weights, ids = _route_rows(router_logits, correction_bias, routing)
    slots = own_slots(ids, expert_map)
    if counts is not None:
        rows = torch.arange(len(ids) // len(counts), device=ids.device)
        is_padding = (rows >= counts.unsqueeze(1)).view(-1, 1)
        slots = slots.masked_fill(is_padding, len(experts.down))
        ids = ids.masked_fill(is_padding, len(expert_load))
    loads = ids.flatten().bincount(minlength=len(expert_load) + 1)
    expert_load.add_(loads[: len(expert_load)])

    def apply(
        experts: ExpertWeights, hidden: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        return apply_experts(hidden, weights, slots, experts, rounds_activations=experts.is_fp8)

    return experts_row_wise(apply, experts, hidden, weights, slots)


def _with_gathered_slots(
    experts: ExpertWeights, adapters: ExpertAdapters, num_rows: int, num_ranks: int
) -> ExpertWeights:
    """Returns experts with the slots of the rows of all data-parallel ranks, which share slots."""
    own = adapters.slots[: num_rows // num_ranks].view(-1, 1)
    slots = gather_rows(own, DATA_PARALLEL, num_ranks).flatten()
    return replace(experts, adapters=replace(adapters, slots=slots))


def _route_rows(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what `route` does; in batch-invariant mode one row at a time."""
    if not is_batch_invariant():
        return route(logits, correction_bias, routing)

    def weights_and_ids(row: torch.Tensor) -> torch.Tensor:
        return torch.stack([each.double() for each in route(row, correction_bias, routing)], dim=1)

    weights, ids = row_wise(weights_and_ids, logits).unbind(1)
    return weights.float(), ids.long()


def _tokens_across_dp() -> torch.Tensor:
    """Returns the number of tokens among the rows of each data-parallel rank, [ranks] int32."""
    metadata = get_forward_context().dp_metadata
    assert metadata is not None, "the worker sets it where ranks gather"
    return metadata.num_tokens_across_dp


def own_slots(ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Maps chosen experts, [T, top_k], to this rank's slots, or to their number for others'."""
    columns = torch.arange(len(ids), device=ids.device) % expert_map.shape[1]
    return expert_map[ids, columns.unsqueeze(1)].long()
