"""Mixture of experts: octavo::fused_moe."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from models.batch_invariance import is_batch_invariant, row_wise
from models.forward_context import slots_of_step
from models.kernels.gpu import has_kernels
from models.number_formats import BLOCK
from models.operands.experts import ExpertAdapters, ExpertWeights, Routing
from models.ops.custom_op import like, operator
from models.ops.experts.expert_formats import expert_values
from models.ops.products.add_adapters import add_slots
from models.ops.products.fp8_linear import quantize


@operator(like("hidden"))
def fused_moe(  # noqa: PLR0913  # an operator takes no dataclasses
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
    gate_up_a: torch.Tensor | None = None,
    gate_up_b: torch.Tensor | None = None,
    down_a: torch.Tensor | None = None,
    down_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sends each token through its best experts and adds up their weighted results.

    It is an operator because the data decide which expert computes which token, which a compiler
    cannot trace. Arguments are the fields of ExpertWeights, Routing and ExpertAdapters, and
    correction_bias of `route`. Maps hidden [T, H] and router_logits [T, E] to [T, H].

    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2.
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
        adapters=with_slots(hidden, gate_up_a, gate_up_b, down_a, down_b),
    )
    return routed_experts(hidden, router_logits, correction_bias, routing, experts)


def routed_experts(
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    routing: Routing,
    experts: ExpertWeights,
) -> torch.Tensor:
    """Adds up the weighted results of each token's experts, [T, H] like hidden."""
    if has_kernels(hidden.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.experts import moe as kernel

        return kernel.apply_experts(
            hidden, *kernel.route(router_logits, correction_bias, routing), experts
        )

    def apply(
        experts: ExpertWeights, hidden: torch.Tensor, router_logits: torch.Tensor
    ) -> torch.Tensor:
        return apply_experts(
            hidden,
            *route(router_logits, correction_bias, routing),
            experts,
            rounds_activations=experts.is_fp8,
        )

    return experts_row_wise(apply, experts, hidden, router_logits)


def experts_row_wise(
    apply: Callable[..., torch.Tensor], experts: ExpertWeights, *inputs: torch.Tensor
) -> torch.Tensor:
    """Returns row_wise of `apply` with experts as its first argument, whose slots are the rows'."""
    adapters = experts.adapters
    if adapters is None:
        return row_wise(partial(apply, experts), *inputs)

    def with_own_slots(slots: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        return apply(replace(experts, adapters=replace(adapters, slots=slots)), *rows)

    return row_wise(with_own_slots, adapters.slots[: len(inputs[0])], *inputs)


def with_slots(
    hidden: torch.Tensor,
    gate_up_a: torch.Tensor | None,
    gate_up_b: torch.Tensor | None,
    down_a: torch.Tensor | None,
    down_b: torch.Tensor | None,
) -> ExpertAdapters | None:
    """Returns adapters with the slots of the step's tokens, which the forward context has.

    None in a step without adapters, or if all four are None, as without room for some. In
    batch-invariant mode steps without adapters have slots of zeros: others' products are rounded
    before the gate, which fused kernels do not do.

    hidden: [T, H].
    """
    if gate_up_a is None or gate_up_b is None or down_a is None or down_b is None:
        return None
    slots = slots_of_step()
    if slots is None and is_batch_invariant():
        slots = hidden.new_zeros(len(hidden), dtype=torch.int32)
    if slots is None:
        return None
    return ExpertAdapters(
        gate_up_a=gate_up_a, gate_up_b=gate_up_b, down_a=down_a, down_b=down_b, slots=slots
    )


def route(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses top_k experts for each token, and their weights.

    Scores are the softmax or sigmoid of the logits. The bias joins them for the choice, not for the
    weights. With groups, only experts of the top_groups best ones are chosen; a group's score is
    that of its best expert or, with a bias, the sum of its best two.

    Returns:
        Weights, [T, top_k] float32, and expert ids, [T, top_k] int64.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2, and "DeepSeek-V3", section 2.1.2.
    """
    logits = logits.float()
    scores = logits.sigmoid() if routing.is_sigmoid else logits.softmax(-1)
    choice = scores if correction_bias is None else scores + correction_bias
    if routing.num_groups > 1:
        groups = choice.view(len(choice), routing.num_groups, -1)
        num_best = 1 if correction_bias is None else 2
        group_scores = groups.topk(num_best, dim=-1).values.sum(-1)
        best_groups = group_scores.topk(routing.top_groups, dim=-1).indices
        is_open = torch.zeros(groups.shape[:2], dtype=torch.bool, device=logits.device)
        is_open = is_open.scatter(1, best_groups, value=True)
        choice = groups.masked_fill(~is_open.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.is_normed:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scaling, ids


def apply_experts(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    *,
    rounds_activations: bool = False,
) -> torch.Tensor:
    """Adds up the results of each token's experts, [T, H] like hidden.

    Weights and ids are [T, top_k]; choices of experts that are not here add nothing. Computes one
    expert after the other. rounds_activations: rounds the input of every product to FP8, in runs of
    128 features.
    """
    num_experts, top_k = len(experts.down), ids.shape[1]
    by_expert = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=num_experts)[:num_experts].tolist()
    exact = torch.promote_types(hidden.dtype, torch.float32)
    output = torch.zeros(hidden.shape, dtype=exact, device=hidden.device)
    for expert, pairs in enumerate(torch.split(by_expert[: sum(counts)], counts)):
        if not len(pairs):
            continue
        tokens = pairs.div(top_k, rounding_mode="floor")
        x = hidden[tokens]
        gate_up = _linear(
            _rounded(x) if rounds_activations else x, expert,
            experts.gate_up, experts.gate_up_scale, experts.gate_up_bias,
            num_parts=experts.num_parts,
        )  # fmt: skip
        adapters = experts.adapters
        if adapters is not None:
            parts, slots = (experts.inner_size,) * experts.num_parts, adapters.slots[tokens]
            a, b = adapters.gate_up_a[:, expert], adapters.gate_up_b[:, expert]
            gate_up = add_slots(gate_up, x, a, b, parts, slots)
        inner = experts.activate(gate_up)
        result = _linear(
            _rounded(inner) if rounds_activations else inner, expert,
            experts.down, experts.down_scale, experts.down_bias,
        )  # fmt: skip
        if adapters is not None:
            a, b = adapters.down_a[:, expert], adapters.down_b[:, expert]
            result = add_slots(result, inner, a, b, (len(b[0]),), slots)
        output.index_add_(0, tokens, result.to(exact) * weights.flatten()[pairs, None])
    return output.to(hidden.dtype)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Returns [T, K] rounded to FP8 and back."""
    values, scale = quantize(x, BLOCK)
    exact = torch.promote_types(x.dtype, torch.float32)
    scales = scale.to(exact).repeat_interleave(BLOCK, -1)[:, : x.shape[-1]]
    return (values.to(exact) * scales).to(x.dtype)


def _linear(
    x: torch.Tensor,
    expert: int,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
    *,
    num_parts: int = 1,
) -> torch.Tensor:
    scale = None if scales is None else scales[expert]
    matrix = expert_values(weights[expert], scale, x.dtype, num_parts=num_parts)
    return functional.linear(x, matrix, None if biases is None else biases[expert])
