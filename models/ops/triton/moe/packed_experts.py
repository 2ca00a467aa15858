"""Experts of 4 bits in bfloat16 on Hopper: chooses the kernels, for MXFP4 and for integers.

models.ops.moe.expert_formats describes the formats.
"""

import torch

from models.ops.batch_invariance import is_batch_invariant
from models.ops.operands.experts import ExpertWeights
from models.ops.triton.moe.expert_forms import ON_CORES, are_few, tile_rows
from models.ops.triton.moe.few_token_experts import few_token_products, has_room
from models.ops.triton.moe.matrix_experts import ALONE_TILES, SORTED_TILES, expert_products
from models.ops.triton.moe.moe_grouped import sum_by_token
from models.ops.triton.moe.moe_routing import sort_by_expert
from models.ops.triton.moe.pair_experts import pair_products


def apply_packed_on_cores(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    output: torch.Tensor,
) -> None:
    """Does what models.ops.triton.moe.moe.apply_experts does, into `output`; both contiguous."""
    results = _results(hidden, ids, experts)
    sum_by_token(results, weights, output, is_partial=experts.is_partial)


def _results(hidden: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    """Returns the results of pairs, not yet weighted, [T * top_k, H]."""
    num_choices, num_pairs = experts.num_choices, ids.numel()
    # Sums of parts of the inputs have other bits.
    if not is_batch_invariant() and are_few(num_pairs, num_choices, ids.shape[1]):
        return pair_products(hidden, ids, experts)
    if are_few(num_pairs, num_choices, ids.shape[1], ON_CORES):
        return expert_products(hidden, ids, experts, None, ALONE_TILES)
    order = sort_by_expert(ids, len(experts.down), num_choices)
    height = tile_rows(num_pairs, num_choices, ON_CORES)
    if has_room(height, experts):
        return few_token_products(hidden, ids, experts, order, height)
    return expert_products(hidden, ids, experts, order, SORTED_TILES[height])
