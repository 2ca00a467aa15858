"""Experts with FP8 products: what their rounding is, and how far it takes them."""

import pytest
import torch

from models.ops.experts.moe import apply_experts, route
from tests.support.moe_case import ROUTINGS, exactly, make_logits, make_quantized_experts
from tests.support.tolerances import FP8_EXPERTS_ERROR

ROUTING = ROUTINGS["softmax"]


def call(num_tokens, hidden_size):
    weights, ids = route(*make_logits(num_tokens, ROUTING), ROUTING)
    return torch.randn(num_tokens, hidden_size), weights, ids


@pytest.mark.parametrize("kind", ["fp8", "fp8-rows"])
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_rounded_activations_are_off_by_a_few_percent(kind, num_tokens):
    experts = make_quantized_experts(kind, hidden=256, inner=200)
    hidden, weights, ids = call(num_tokens, 256)
    exact = apply_experts(hidden.double(), weights.double(), ids, exactly(experts))
    rounded = apply_experts(hidden, weights, ids, experts, rounds_activations=True)
    error = (rounded - exact).norm() / exact.norm()
    assert 0.01 < error < FP8_EXPERTS_ERROR


@pytest.mark.parametrize(("kind", "is_rounded"), [("fp8", True), ("mxfp4", False)])
def test_the_operator_rounds_before_products_of_fp8_alone(kind, is_rounded):
    experts = make_quantized_experts(kind, hidden=256, inner=192)
    logits, bias = make_logits(3, ROUTING)
    hidden, weights, ids = call(3, 256)
    output = torch.ops.octavo.fused_moe(
        hidden, logits, experts.gate_up, experts.down, None, None, experts.gate_up_scale,
        experts.down_scale, bias, ROUTING.top_k, ROUTING.is_sigmoid, ROUTING.is_normed,
        ROUTING.scaling, ROUTING.num_groups, ROUTING.top_groups, experts.alpha, experts.limit,
        experts.adds_one,
    )  # fmt: skip
    expected = apply_experts(hidden, weights, ids, experts, rounds_activations=is_rounded)
    assert torch.equal(output, expected)


def test_a_tokens_output_does_not_depend_on_the_others_rounding():
    experts = make_quantized_experts("fp8", hidden=256, inner=200)
    hidden, weights, ids = call(5, 256)
    hidden[1] *= 100
    together = apply_experts(hidden, weights, ids, experts, rounds_activations=True)
    alone = apply_experts(hidden[:1], weights[:1], ids[:1], experts, rounds_activations=True)
    torch.testing.assert_close(together[:1], alone)
