"""Products of single pairs of a token and an expert of 4 bits on Hopper; see pair_kernel."""

from functools import lru_cache

import torch

from models.ops.operands.experts import ExpertWeights
from models.ops.triton.launching.dependent_launch import launch_options
from models.ops.triton.launching.launch import Launch
from models.ops.triton.moe.pair_kernel import pair_kernel

_ROWS = 16
_NUM_WARPS = 8
"""Of a program. Measured with one token of gpt-oss-20b (H100, 2026-11): 30.3 us a layer; 31.2 with
gate and up in 4 warps, 30.9 with them in 32 rows, 32.1 with down in 4 warps."""


def pair_products(hidden: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    """Returns the results of pairs of a token and an expert, not yet weighted, [T * top_k, H].

    hidden [T, H] bfloat16 and ids [T, top_k] int32 are contiguous; pairs of experts that are not
    here get no values. Each pair reads its expert, which the second-level cache may have.
    """
    num_pairs, inner = ids.numel(), experts.inner_size
    assert experts.gate_up_scale is not None, "the weights are of 4 bits"
    assert experts.down_scale is not None, "the weights are of 4 bits"
    between = hidden.new_empty(num_pairs, inner)
    results = hidden.new_empty(num_pairs, hidden.shape[1])
    gate_up_bias, down_bias = experts.biases_or(hidden)
    for x, weight, scale, bias, output, is_gated in (
        (hidden, experts.gate_up, experts.gate_up_scale, gate_up_bias, between, True),
        (between, experts.down, experts.down_scale, down_bias, results, False),
    ):
        num_outputs = output.shape[1]
        launch = _launcher(
            num_outputs, x.shape[1], scale.shape[-1], len(experts.down), ids.shape[1], is_gated,
            experts.gate_up_bias is not None, experts.limit is not None, hidden.device,
        )  # fmt: skip
        launch(
            (num_pairs, -(-num_outputs // (_ROWS // 2 if is_gated else _ROWS)), 1),
            weight.view(torch.int32), x, scale, bias, ids, output,
            experts.alpha, experts.limit or 0.0,
        )  # fmt: skip
    return results


@lru_cache
def _launcher(
    num_outputs: int,
    num_inputs: int,
    each: int,
    num_experts: int,
    top_k: int,
    is_gated: bool,
    has_bias: bool,
    is_clamped: bool,
    device: torch.device,
) -> Launch:
    return Launch(
        pair_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, EACH=each,
        NUM_EXPERTS=num_experts, TOP_K=top_k, IS_GATED=is_gated, HAS_BIAS=has_bias,
        IS_CLAMPED=is_clamped, ROWS=_ROWS, num_warps=_NUM_WARPS, **launch_options(device),
    )  # fmt: skip
