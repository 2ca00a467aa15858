"""Experts without gates on a GPU: every format against a float64 reference, and replay."""

from dataclasses import fields, replace

import pytest
import torch

from models.kernels.gpu import HOPPER
from models.ops.experts import moe as reference
from tests.support.moe_case import (
    ROUTINGS,
    exactly,
    make_experts,
    make_logits,
    make_quantized_experts,
)

pytestmark = pytest.mark.gpu

ERROR, FP8_ERROR = 0.02, 0.05
"""Errors of all results, relative to their norm: an inner value is rounded twice, and squared;
after that some become another neighbour in FP8."""
ROUTING = ROUTINGS["sigmoid-groups"]
HIDDEN, INNER = 320, 192

each_format = pytest.mark.parametrize("kind", ["plain", "fp8", "fp8-rows", "nvfp4", "int4-64"])


def case(kind, num_tokens):
    """Returns the arguments of apply_experts on the GPU, and the exact results."""
    if kind == "plain":
        gated = make_experts(hidden=HIDDEN, inner=INNER, dtype=torch.bfloat16)
        experts = replace(gated, gate_up=gated.gate_up[:, :INNER].contiguous(), is_squared=True)
    else:
        experts = make_quantized_experts(kind, hidden=HIDDEN, inner=INNER, is_squared=True)
    is_of_4_bits = kind in ("nvfp4", "int4-64")
    if is_of_4_bits and torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("experts in this format stay in 4 bits on Hopper alone")
    hidden = torch.randn(num_tokens, HIDDEN).bfloat16()
    weights, ids = reference.route(*make_logits(num_tokens, ROUTING), ROUTING)
    exact = reference.apply_experts(
        hidden.double(), weights.double(), ids, exactly(experts),
        rounds_activations=experts.is_fp8,
    )  # fmt: skip
    moved = {
        field.name: getattr(experts, field.name).cuda()
        for field in fields(experts)
        if isinstance(getattr(experts, field.name), torch.Tensor)
    }
    arguments = hidden.cuda(), weights.float().cuda(), ids.int().cuda()
    return (*arguments, replace(experts, **moved)), exact


def assert_near(actual, exact, kind):
    error = FP8_ERROR if kind.startswith("fp8") else ERROR
    assert (actual.cpu().double() - exact).norm() < error * exact.norm()


@each_format
@pytest.mark.parametrize("num_tokens", [1, 7, 30, 120, 600])
def test_results_are_those_of_dequantised_weights(kind, num_tokens):
    from models.kernels.experts.moe import apply_experts

    arguments, exact = case(kind, num_tokens)
    assert_near(apply_experts(*arguments), exact, kind)


@each_format
@pytest.mark.parametrize("num_tokens", [1, 120])
def test_a_captured_call_follows_its_inputs(kind, num_tokens):
    from models.kernels.experts.moe import apply_experts

    (hidden, *others), exact = case(kind, num_tokens)
    static = torch.zeros_like(hidden)
    apply_experts(static, *others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = apply_experts(static, *others)
    static.copy_(hidden)
    graph.replay()
    assert_near(output, exact, kind)
