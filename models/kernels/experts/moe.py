"""Experts on a GPU: chooses the kernels."""

from collections.abc import Callable
from functools import partial

import torch

from models.batch_invariance import is_batch_invariant
from models.kernels.experts.adapted_experts import apply_adapted
from models.kernels.experts.expert_forms import are_few, takes_cores
from models.kernels.experts.fp8.fp8_experts import apply_fp8_on_cores, takes_experts
from models.kernels.experts.fp8.moe_fp8 import apply_fp8
from models.kernels.experts.moe_grouped import apply_grouped
from models.kernels.experts.moe_pairs import apply_pairs
from models.kernels.experts.moe_routing import route as route
from models.kernels.experts.packed.moe_mxfp4 import apply_mxfp4
from models.kernels.experts.packed.packed_experts import apply_packed_on_cores
from models.kernels.experts.token_chunks import token_chunks
from models.kernels.experts.torch_experts import apply_by_torch
from models.operands.experts import ExpertWeights

_apply_alone = partial(apply_grouped, is_alone=True)
"""Tensor cores for few pairs, too: scalar products would have other bits."""
_MOST_ALONE = 32
"""Most pairs of _apply_alone.

Qwen3-30B-A3B's experts took 105, 151 and 199 us for 4, 6 and 8 tokens, sorted 102, 140 and 174, and
81 and 84 for 3 (H100, 2026-11).
"""


def apply_experts(
    hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Does what models.ops.experts.moe.apply_experts does, on a GPU.

    The kernels depend on shapes alone and the host reads nothing, so a call may be captured. Sums
    are added in a fixed order: equal inputs give equal bits. Chunks of tokens bound the memory.
    """
    num_tokens, top_k = ids.shape
    apply: Callable[..., None]
    if experts.adapters is not None:
        apply = apply_adapted
    elif experts.is_fp8 and takes_experts(experts) and not is_batch_invariant():
        apply = apply_fp8_on_cores
    elif experts.is_fp8:
        apply = apply_fp8
    elif experts.is_quantized:
        is_on_cores = takes_cores(hidden.dtype, hidden.device)
        apply = apply_packed_on_cores if is_on_cores else apply_mxfp4
    elif experts.is_squared or experts.is_gelu:
        apply = apply_by_torch
    elif not are_few(ids.numel(), experts.num_choices, top_k):
        apply = apply_grouped
    elif not is_batch_invariant():
        apply = apply_pairs
    else:
        apply = _apply_alone if ids.numel() <= _MOST_ALONE else apply_grouped
    hidden = hidden.contiguous()
    output = torch.empty_like(hidden)
    for chunk in token_chunks(
        num_tokens, top_k=top_k, itemsize=hidden.dtype.itemsize, experts=experts
    ):
        own = experts.of_tokens(chunk)
        apply(hidden[chunk], weights[chunk], ids[chunk], own, output[chunk])
    return output
