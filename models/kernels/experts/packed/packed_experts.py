"""Experts of 4 bits in bfloat16 on Hopper: chooses the kernels, for MXFP4 and for integers.

models.ops.experts.expert_formats describes the formats.
"""

from collections.abc import Callable
from functools import partial

import torch

from models.batch_invariance import is_batch_invariant
from models.kernels.experts.expert_forms import ON_CORES, are_few, tile_rows
from models.kernels.experts.moe_grouped import sum_by_token
from models.kernels.experts.moe_routing import sort_by_expert
from models.kernels.experts.packed.expert_product import (
    ExpertProduct,
    both_products,
    ungated_product,
)
from models.kernels.experts.packed.few_token_experts import few_token_product, few_token_tiles
from models.kernels.experts.packed.matrix_experts import expert_product, sorted_tiles
from models.kernels.experts.packed.pair_experts import pair_product
from models.kernels.experts.torch_experts import squared_results
from models.kernels.tuning.hopper import EXPERTS_ALONE
from models.operands.experts import ExpertWeights


def apply_packed_on_cores(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    output: torch.Tensor,
) -> None:
    """Does what models.kernels.experts.moe.apply_experts does, into `output`; both contiguous."""
    results = _results(hidden, ids, experts)
    sum_by_token(results, weights, output, is_partial=experts.is_partial)


def _results(hidden: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    """Returns the results of pairs, not yet weighted, [T * top_k, H]."""
    multiply, pairs = _multiplier(ids, experts)
    if experts.is_squared:
        up, down = (
            partial(_ungated, ids=ids, weight=weight, scale=scale, multiply=multiply)
            for weight, scale in (
                (experts.gate_up, experts.gate_up_scale),
                (experts.down, experts.down_scale),
            )
        )
        return squared_results(hidden, ids.shape[1], pairs, up, down)
    products = both_products(hidden, ids, experts)
    for product in products:
        multiply(product)
    return products[-1].output


def _ungated(
    x: torch.Tensor,
    *,
    ids: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    multiply: Callable[[ExpertProduct], None],
) -> torch.Tensor:
    """Returns the product of rows of pairs, in the order of the experts, with a matrix."""
    assert scale is not None, "the weights are of 4 bits"
    product = ungated_product(x, ids, weight, scale)
    multiply(product)
    return product.output


def _multiplier(
    ids: torch.Tensor, experts: ExpertWeights
) -> tuple[Callable[[ExpertProduct], None], torch.Tensor | None]:
    """Returns what computes a product, and the pairs in the order of its rows between products.

    None: that of `ids`.
    """
    num_choices, num_pairs = experts.num_choices, ids.numel()
    # Sums of parts of the inputs have other bits.
    if not is_batch_invariant() and are_few(num_pairs, num_choices, ids.shape[1]):
        return pair_product, None
    if are_few(num_pairs, num_choices, ids.shape[1], ON_CORES):
        return partial(expert_product, order=None, tiles=EXPERTS_ALONE), None
    order = sort_by_expert(ids, len(experts.down), num_choices)
    height = tile_rows(num_pairs, num_choices, ON_CORES)
    return partial(_multiply_sorted, order=order, height=height), order[0]


def _multiply_sorted(
    product: ExpertProduct, order: tuple[torch.Tensor, torch.Tensor], height: int
) -> None:
    """Computes a product in tiles of some height, which all have the same bits."""
    tiles = few_token_tiles(height, product)
    if tiles is None:
        expert_product(product, order, sorted_tiles(height, product.shape))
    else:
        few_token_product(product, order, tiles)
