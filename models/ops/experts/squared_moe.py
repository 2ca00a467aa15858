"""Mixture of experts without gates, whose activation is a squared ReLU: octavo::squared_moe."""

import torch
from torch.nn import functional

from models.batch_invariance import row_wise
from models.kernels.gpu import has_kernels
from models.operands.experts import Routing
from models.ops.custom_op import direct_register_custom_op
from models.ops.experts.moe import route


def _squared_moe(  # noqa: PLR0913  # an operator takes no dataclasses
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    correction_bias: torch.Tensor,
    top_k: int,
    is_normed: bool,
    scaling: float,
    num_groups: int,
    top_groups: int,
) -> torch.Tensor:
    """Sends each token through its best experts, down(relu(up(x))^2), and adds up the results.

    Maps hidden [T, H] and router_logits [T, E] to [T, H]. up: [E, I, H]. down: [E, H, I].
    correction_bias: of models.ops.experts.moe.route, with sigmoid scores; the others are fields of
    Routing.

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
    if has_kernels(hidden.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.experts import moe as kernel

        return grouped_experts(
            hidden, *kernel.route(router_logits, correction_bias, routing), up, down
        )

    def apply(hidden: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        return _experts(hidden, *route(router_logits, correction_bias, routing), up, down)

    return row_wise(apply, hidden, router_logits)


def grouped_experts(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Adds up the results of each token's experts by torch's grouped products; reads nothing back.

    Weights and ids are [T, top_k].
    """
    num_tokens, top_k = ids.shape
    size = hidden.shape[1]
    hidden, up, down = _aligned(hidden), _aligned(up), _aligned(down)
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    experts = torch.arange(len(up), device=ids.device)
    ends = torch.searchsorted(flat[order], experts, right=True).int()
    x = hidden[order.div(top_k, rounding_mode="floor")]
    inner = torch._grouped_mm(x, up.transpose(1, 2), ends).relu().square()
    sorted_results = torch._grouped_mm(inner, down.transpose(1, 2), ends)
    results = torch.empty_like(sorted_results)
    results[order] = sorted_results
    weighed = results.view(num_tokens, top_k, -1).float() * weights.unsqueeze(-1)
    return weighed.sum(1)[:, :size].to(hidden.dtype)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns tokens [T, H] or weights [E, N, K] whose rows begin at multiples of 16 bytes.

    Grouped products need that; zeros fill rows and, of weights, the number of rows up to it.
    """
    multiple = 16 // x.element_size()
    missing = -x.shape[-1] % multiple
    padding = (0, missing) if x.dim() == 2 else (0, missing, 0, -x.shape[1] % multiple)
    return functional.pad(x, padding) if any(padding) else x


def _experts(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Adds up the results of each token's experts, one expert after the other."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    output = torch.zeros(hidden.shape, dtype=exact, device=hidden.device)
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        inner = (hidden[tokens] @ up[expert].T).relu().square()
        result = (inner @ down[expert].T).to(exact)
        output.index_add_(0, tokens, result * weights[tokens, choices].unsqueeze(1))
    return output.to(hidden.dtype)


def _fake_squared_moe(hidden: torch.Tensor, *others: object) -> torch.Tensor:
    del others
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


squared_moe = direct_register_custom_op("squared_moe", _squared_moe, (), _fake_squared_moe)
