"""Experts with low-rank adapters: products that are not fused with the gate, which comes after."""

from collections.abc import Callable
from functools import partial

import torch

from models.kernels.experts.expert_adapters import add_expert_adapters
from models.kernels.experts.expert_forms import takes_cores
from models.kernels.experts.fp8.moe_fp8 import fp8_product
from models.kernels.experts.moe_grouped import grouped_product, sum_by_token
from models.kernels.experts.packed.matrix_experts import packed_product
from models.kernels.experts.packed.moe_mxfp4 import pairs_product
from models.kernels.experts.pair_order import PairOrder
from models.operands.experts import ExpertWeights


def apply_adapted(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    output: torch.Tensor,
) -> None:
    """Does what models.kernels.experts.moe.apply_experts does, into `output`; both contiguous."""
    adapters = experts.adapters
    assert adapters is not None, "others have fused kernels"
    order = PairOrder.of(ids, len(experts.down), experts.num_choices)
    multiply_gate_up, multiply = _products(hidden, experts, order)
    add = partial(add_expert_adapters, slots=adapters.slots, order=order)
    x = order.of_tokens(hidden)
    gate_up = multiply_gate_up(x, experts.gate_up, experts.gate_up_scale, experts.gate_up_bias)
    add(gate_up, hidden, adapters.gate_up_a, adapters.gate_up_b)
    inner = experts.activate(gate_up.float()).to(hidden.dtype)
    results = multiply(order.sorted(inner), experts.down, experts.down_scale, experts.down_bias)
    add(results, inner, adapters.down_a, adapters.down_b)
    sum_by_token(results, weights, output, is_partial=experts.is_partial)


def _products(
    hidden: torch.Tensor, experts: ExpertWeights, order: PairOrder
) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Returns what multiplies pairs with gate and up, and with down."""
    product: Callable[..., torch.Tensor] = fp8_product if experts.is_fp8 else grouped_product
    if not experts.is_quantized or experts.is_fp8:
        return (partial(product, order=order),) * 2
    product = packed_product if takes_cores(hidden.dtype, hidden.device) else pairs_product
    return partial(product, order=order, num_parts=experts.num_parts), partial(product, order=order)
