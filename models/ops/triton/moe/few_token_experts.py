"""Products of MXFP4 experts of few tokens each on Hopper; few_token_kernel describes how."""

from functools import lru_cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.ops.operands.experts import ExpertWeights
from models.ops.triton.launching.dependent_launch import launch_options
from models.ops.triton.launching.launch import Launch
from models.ops.triton.moe.few_token_kernel import COLUMNS, ROWS, few_token_kernel
from models.ops.triton.moe.matrix_experts import ExpertShape, described

FEW_TOKENS = 8
"""Height of a tile of tokens."""
MOST_INPUTS = 23 * int(COLUMNS.value)
"""Of both products; their tokens and the ring leave room for two programs."""
_SLOTS = 7
_PROGRAMS = 2
"""Of a multiprocessor.

Measured with gpt-oss-20b (H200, 2026-11-26; us of gate and up, and of down): 8 tokens 62.1 and
30.5, in tiles of expert_kernel 68.4 and 35.0; 32 tokens 92.1 and 45.9, there 96.0 and 51.2. One
program with 256 rows: 62.8 and 32.5, 93.3 and 48.1. Two with steps of 256 inputs, 64 rows: 65.3 and
32.6, 90.6 and 48.8.
"""
_REGISTERS = {"maxnreg": 80, "GROUP_REGISTERS": 96, "LOAD_REGISTERS": 48}
"""Of a thread, at first, then in a group that multiplies and in the warp that fetches."""


def has_room(hidden_size: int, inner_size: int) -> bool:
    """Returns whether the kernel takes experts of this size."""
    return max(hidden_size, inner_size) <= MOST_INPUTS


def few_token_products(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    order: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Does what models.ops.triton.moe.matrix_experts.expert_products does, for sorted pairs."""
    num_pairs = ids.numel()
    assert experts.gate_up_scale is not None, "the weights are MXFP4"
    assert experts.down_scale is not None, "the weights are MXFP4"
    between = hidden.new_empty(num_pairs, experts.inner_size)
    results = hidden.new_empty(num_pairs, hidden.shape[1])
    pairs, starts = order
    gate_up_bias, down_bias = experts.biases_or(hidden)
    shape = ExpertShape.of(experts, ids.shape[1], is_alone=False)
    properties = torch.cuda.get_device_properties(hidden.device)
    for x, weight, scale, bias, output, is_gated in (
        (hidden, experts.gate_up, experts.gate_up_scale, gate_up_bias, between, True),
        (between, experts.down, experts.down_scale, down_bias, results, False),
    ):
        num_outputs = output.shape[1]
        words = scale.view(torch.int32)
        _launcher(num_outputs, x.shape[1], shape, is_gated, hidden.device)(
            (_PROGRAMS * properties.multi_processor_count, 1, 1),
            described(weight, num_outputs, ROWS.value, COLUMNS.value), _described_scales(words), x,
            words, bias, pairs, starts, output, experts.alpha, experts.limit or 0.0,
        )  # fmt: skip
    return results


def _described_scales(words: torch.Tensor) -> TensorDescriptor:
    """Describes words of scales, [E, words of a row, rows, 1], to the copy engine."""
    num_experts, num_words, num_rows, _ = words.shape
    return TensorDescriptor(
        words,
        [num_experts * num_words, num_rows],
        [num_rows, 1],
        [1, ROWS.value],
        gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2),
    )


@lru_cache
def _launcher(
    num_outputs: int, num_inputs: int, shape: ExpertShape, is_gated: bool, device: torch.device
) -> Launch:
    return Launch(
        few_token_kernel, NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs,
        NUM_EXPERTS=shape.num_experts, TOP_K=shape.top_k, IS_GATED=is_gated,
        HAS_BIAS=shape.has_bias, IS_CLAMPED=shape.is_clamped, TOKENS=FEW_TOKENS, SLOTS=_SLOTS,
        BLOCK_E=max(32, triton.next_power_of_2(shape.num_experts)), num_warps=4, **_REGISTERS,
        **launch_options(device),
    )  # fmt: skip
