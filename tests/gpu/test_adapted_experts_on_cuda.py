"""Experts with adapters on a GPU: every format against a float64 reference, and replay."""

from dataclasses import fields, replace

import pytest
import torch

from models.ops.experts import moe as reference
from tests.support.expert_adapter_case import exact_adapters, make_expert_adapters
from tests.support.invariance import batch_invariance
from tests.support.moe_case import (
    NUM_EXPERTS,
    ROUTINGS,
    exactly,
    make_experts,
    make_logits,
    make_quantized_experts,
    part_of,
)

pytestmark = pytest.mark.gpu

ERROR, FP8_ERROR = 0.02, 0.05
"""Errors of all results, relative to their norm: results before the gate are rounded, too."""
ROUTING = ROUTINGS["sigmoid-groups"]
HIDDEN, INNER = 320, 256

each_format = pytest.mark.parametrize(
    "kind",
    [
        *("plain", "odd", "clamped", "squared", "gelu", "fp8", "fp8-rows"),
        *("mxfp4", "nvfp4", "int4-32", "int4-64", "int4-128", "int4-128-squared"),
        *("plain-part", "fp8-part", "mxfp4-part", "int4-128-part"),
    ],
)


def make(kind, dtype):
    kind = kind.removesuffix("-part")
    if kind.startswith("fp8"):
        return make_quantized_experts(kind, hidden=HIDDEN, inner=INNER)
    if "4" in kind:
        is_squared = kind.endswith("squared")
        return make_quantized_experts(
            kind.removesuffix("-squared"), hidden=384, inner=INNER, dtype=dtype,
            is_clamped=not is_squared, is_squared=is_squared,
        )  # fmt: skip
    if kind in ("odd", "clamped"):
        return make_experts(hidden=36, inner=20, dtype=dtype, is_clamped=kind == "clamped")
    gated = make_experts(hidden=HIDDEN, inner=INNER, dtype=dtype)
    if kind == "squared":
        return replace(gated, gate_up=gated.gate_up[:, :INNER].contiguous(), is_squared=True)
    return replace(gated, is_gelu=kind == "gelu")


def on_cuda(values):
    moved = {
        field.name: getattr(values, field.name).cuda()
        for field in fields(values)
        if isinstance(getattr(values, field.name), torch.Tensor)
    }
    return replace(values, **moved)


def case(kind, num_tokens, dtype=torch.bfloat16, rank=16):
    """Returns the arguments of apply_experts on the GPU, and the exact results."""
    experts, is_part = make(kind, dtype), kind.endswith("-part")
    if is_part:
        experts = part_of(experts, range(0, NUM_EXPERTS, 2))
    adapters = make_expert_adapters(experts, num_tokens, rank=rank, dtype=dtype)
    hidden = torch.randn(num_tokens, experts.down.shape[1]).to(dtype)
    weights, ids = reference.route(*make_logits(num_tokens, ROUTING), ROUTING)
    if is_part:  # other ranks have the rest
        is_own = ids % 2 == 0
        ids, weights = torch.where(is_own, ids // 2, NUM_EXPERTS // 2), weights * is_own
    exact = reference.apply_experts(
        hidden.double(), weights.double(), ids,
        replace(exactly(experts), adapters=exact_adapters(adapters), is_gelu=experts.is_gelu),
        rounds_activations=experts.is_fp8,
    )  # fmt: skip
    arguments = hidden.cuda(), weights.float().cuda(), ids.int().cuda()
    return (*arguments, replace(on_cuda(experts), adapters=on_cuda(adapters))), exact


def assert_near(actual, exact, kind):
    error = FP8_ERROR if kind.startswith("fp8") else ERROR
    assert (actual.cpu().double() - exact).norm() < error * exact.norm()


@each_format
@pytest.mark.parametrize("num_tokens", [1, 7, 30, 120, 600])
def test_results_are_those_of_merged_weights(kind, num_tokens):
    from models.kernels.experts.moe import apply_experts

    arguments, exact = case(kind, num_tokens)
    assert_near(apply_experts(*arguments), exact, kind)


@each_format
def test_tokens_have_the_same_bits_among_any_others_in_batch_invariant_mode(kind):
    from models.kernels.experts.moe import apply_experts

    with batch_invariance():
        (hidden, weights, ids, experts), exact = case(kind, 600)
        whole = apply_experts(hidden, weights, ids, experts)
        assert_near(whole, exact, kind)
        for count in (1, 2, 7, 30, 120, 300):
            own = apply_experts(hidden[:count], weights[:count], ids[:count], experts)
            assert torch.equal(own, whole[:count])


@pytest.mark.parametrize("rank", [1, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "mxfp4"])
def test_large_ranks_and_other_dtypes(kind, dtype, rank):
    from models.kernels.experts.moe import apply_experts

    arguments, exact = case(kind, 120, dtype, rank)
    assert_near(apply_experts(*arguments), exact, kind)


@each_format
@pytest.mark.parametrize("num_tokens", [1, 120])
def test_a_captured_call_follows_its_inputs_and_slots(kind, num_tokens):
    from models.kernels.experts.moe import apply_experts

    (hidden, weights, ids, experts), exact = case(kind, num_tokens)
    static, slots = torch.zeros_like(hidden), torch.zeros_like(experts.adapters.slots)
    still = replace(experts, adapters=replace(experts.adapters, slots=slots))
    apply_experts(static, weights, ids, still)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = apply_experts(static, weights, ids, still)
    static.copy_(hidden)
    slots.copy_(experts.adapters.slots)
    graph.replay()
    assert_near(output, exact, kind)
