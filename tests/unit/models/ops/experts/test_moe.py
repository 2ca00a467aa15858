from dataclasses import replace

import pytest
import torch

from models.operands.experts import ExpertWeights
from models.ops.experts.moe import apply_experts, route
from tests.support.moe_case import (
    NUM_EXPERTS,
    ROUTINGS,
    exactly,
    make_experts,
    make_logits,
    make_quantized_experts,
)

ALL_ROUTINGS = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)


def operator_arguments(num_tokens, routing, experts):
    logits, bias = make_logits(num_tokens, routing)
    hidden = torch.randn(num_tokens, experts.down.shape[1])
    return (
        hidden,
        logits,
        experts.gate_up,
        experts.down,
        experts.gate_up_bias,
        experts.down_bias,
        experts.gate_up_scale,
        experts.down_scale,
        bias,
        routing.top_k,
        routing.is_sigmoid,
        routing.is_normed,
        routing.scaling,
        routing.num_groups,
        routing.top_groups,
        experts.alpha,
        experts.limit,
        experts.adds_one,
    )


@ALL_ROUTINGS
def test_each_token_gets_distinct_experts_of_its_open_groups(routing):
    _, ids = route(*make_logits(50, routing), routing)
    assert all(len(set(row)) == routing.top_k for row in ids.tolist())
    groups = ids // (NUM_EXPERTS // routing.num_groups)
    assert all(len(set(row)) <= routing.top_groups for row in groups.tolist())


def test_normed_weights_sum_to_the_scaling_factor():
    routing = ROUTINGS["sigmoid-groups"]
    weights, _ = route(*make_logits(9, routing), routing)
    torch.testing.assert_close(weights.sum(-1), torch.full((9,), routing.scaling))


def test_the_correction_bias_changes_the_choice_and_not_the_weights():
    routing = ROUTINGS["sigmoid-groups"]
    logits, bias = make_logits(9, routing)
    weights, ids = route(logits, bias, routing)
    scores = logits.sigmoid().gather(1, ids)
    expected = scores / scores.sum(-1, keepdim=True) * routing.scaling
    torch.testing.assert_close(weights, expected)
    assert not torch.equal(ids, route(logits, torch.zeros_like(bias), routing)[1])


@pytest.mark.parametrize("is_clamped", [False, True])
@ALL_ROUTINGS
def test_output_is_the_weighted_sum_of_what_each_expert_returns(routing, is_clamped):
    experts = make_experts(is_clamped=is_clamped)
    weights, ids = route(*make_logits(8, routing), routing)
    hidden = torch.randn(8, 36)
    expected = torch.zeros(8, 36)
    for token, (row, factors) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for expert, factor in zip(row, factors, strict=True):
            inner = experts.gate_up[expert] @ hidden[token]
            if is_clamped:
                inner += experts.gate_up_bias[expert]
            result = experts.down[expert] @ experts.activate(inner)
            if is_clamped:
                result += experts.down_bias[expert]
            expected[token] += factor * result
    actual = apply_experts(hidden, weights, ids, experts)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_clamped_gate_is_bounded_above_and_up_on_both_sides():
    gate_up = torch.tensor([[100.0, -100.0, 0.5, 100.0, -100.0, 0.25]])
    experts = ExpertWeights(
        gate_up=torch.empty(1, 6, 2), down=torch.empty(1, 2, 3), alpha=2.0, limit=3.0
    )
    result = experts.activate(gate_up)[0].tolist()
    at_limit = 3.0 * torch.sigmoid(torch.tensor(6.0)).item()
    half = 0.5 * torch.sigmoid(torch.tensor(1.0)).item()
    assert result == pytest.approx([at_limit * 4.0, 0.0, half * 1.25])
    result = replace(experts, adds_one=False).activate(gate_up)[0].tolist()
    assert result == pytest.approx([at_limit * 3.0, 0.0, half * 0.25])


@pytest.mark.parametrize("is_clamped", [False, True])
@ALL_ROUTINGS
def test_operator_passes_torchs_own_checks(routing, is_clamped):
    arguments = operator_arguments(5, routing, make_experts(is_clamped=is_clamped))
    torch.library.opcheck(torch.ops.octavo.fused_moe.default, arguments)


@pytest.mark.parametrize(("kind", "inner"), [("fp8", 200), ("mxfp4", 96)])
def test_quantised_experts_compute_with_the_values_they_represent(kind, inner):
    experts = make_quantized_experts(kind, inner=inner, is_clamped=True)
    weights, ids = route(*make_logits(8, ROUTINGS["softmax"]), ROUTINGS["softmax"])
    hidden = torch.randn(8, 64)
    exact = apply_experts(hidden.double(), weights.double(), ids, exactly(experts))
    torch.testing.assert_close(apply_experts(hidden, weights, ids, experts).double(), exact,
                               rtol=1e-5, atol=1e-5)  # fmt: skip
