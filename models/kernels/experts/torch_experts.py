"""Experts without gates, down(relu(up(x))^2), or with gates that are gelus, on a GPU."""

from collections.abc import Callable

import torch
from torch.nn import functional

from models.operands.experts import ExpertWeights

Product = Callable[[torch.Tensor], torch.Tensor]
"""Maps rows of pairs, in the order of the experts, to results of pairs in the order of tokens."""


def squared_results(
    hidden: torch.Tensor, top_k: int, pairs: torch.Tensor | None, up: Product, down: Product
) -> torch.Tensor:
    """Returns the results of pairs of a token and an expert, not yet weighted, [T * top_k, H].

    pairs: of moe_routing.sort_by_expert, [T * top_k]; None: the order is that of tokens.
    """
    if pairs is None:
        return down(up(hidden.repeat_interleave(top_k, 0)).relu().square())
    # Past the last pair of an expert that is here they have no values.
    pairs = pairs.clamp(0, len(pairs) - 1)
    return down(up(hidden[pairs // top_k])[pairs].relu().square())


def apply_by_torch(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    output: torch.Tensor,
) -> None:
    """Does what models.kernels.experts.moe.apply_experts does for plain weights, into `output`.

    By torch's grouped products; the host reads nothing. Weights and ids are [T, top_k].
    """
    num_tokens, top_k = ids.shape
    size, num_experts, num_rows = hidden.shape[1], len(experts.down), experts.gate_up.shape[1]
    hidden, up, down = _aligned(hidden), _aligned(experts.gate_up), _aligned(experts.down)
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    numbers = torch.arange(num_experts, device=ids.device)
    ends = torch.searchsorted(flat[order], numbers, right=True).int()
    x = hidden[order.div(top_k, rounding_mode="floor")]
    inner = experts.activate(torch._grouped_mm(x, up.transpose(1, 2), ends)[:, :num_rows])
    sorted_results = torch._grouped_mm(_aligned(inner), down.transpose(1, 2), ends)
    results = torch.empty_like(sorted_results)
    results[order] = sorted_results
    weighed = results.view(num_tokens, top_k, -1).float() * weights.unsqueeze(-1)
    if experts.is_partial:
        weighed = weighed.masked_fill((ids == num_experts).unsqueeze(-1), 0.0)
    output.copy_(weighed.sum(1)[:, :size])


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns tokens [T, H] or weights [E, N, K] whose rows begin at multiples of 16 bytes.

    Grouped products need that; zeros fill rows and, of weights, the number of rows up to it.
    """
    multiple = 16 // x.element_size()
    missing = -x.shape[-1] % multiple
    padding = (0, missing) if x.dim() == 2 else (0, missing, 0, -x.shape[1] % multiple)
    return functional.pad(x, padding) if any(padding) else x
