"""Experts' kernels against float64 references: every dtype, real and odd shapes, replay."""

import pytest
import torch

from models.ops import moe as reference
from models.ops.experts import Routing
from tests.support.moe_case import NUM_EXPERTS, ROUTINGS, exactly, make_experts, make_logits
from tests.support.tolerances import ROW_TOLERANCE, assert_rows_close

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ROW_TOLERANCE, ids=str)
TOP_8 = Routing(top_k=8, is_sigmoid=False, is_normed=True, scaling=1.0, num_groups=1, top_groups=1)
TOP_4 = Routing(top_k=4, is_sigmoid=False, is_normed=True, scaling=1.0, num_groups=1, top_groups=1)
QWEN3_30B = {"num_experts": 128, "hidden": 2048, "inner": 768}
GPT_OSS_20B = {"num_experts": 32, "hidden": 2880, "inner": 2880, "is_clamped": True}


def check(num_tokens, routing, *, dtype, **shape):
    # Triton is imported where it is used: collecting these tests needs none.
    from models.ops.triton import moe as kernels
    from models.ops.triton.moe_grouped import apply_grouped
    from models.ops.triton.moe_pairs import apply_pairs

    experts = make_experts(dtype=dtype, device="cuda", **shape)
    num_experts, hidden_size, _ = experts.down.shape
    logits, bias = make_logits(num_tokens, routing, num_experts=num_experts, device="cuda")
    weights, ids = kernels.route(logits, bias, routing)
    expected_weights, expected_ids = reference.route(logits, bias, routing)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights)
    hidden = torch.randn(num_tokens, hidden_size, device="cuda").to(dtype)
    exact = reference.apply_experts(
        hidden.double().cpu(), weights.double().cpu(), expected_ids.cpu(), exactly(experts)
    )
    for apply in (apply_pairs, apply_grouped, kernels.apply_experts):
        actual = apply(hidden, weights, ids, experts)
        assert_rows_close(actual, exact)
        assert torch.equal(actual, apply(hidden, weights, ids, experts))


@DTYPES
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("num_tokens", [1, 7, 33, 300])
def test_odd_experts_are_the_references(num_tokens, routing, dtype):
    check(num_tokens, routing, dtype=dtype, is_clamped=num_tokens == 7)


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 128, 700])
def test_qwen3_30b_is_the_references(num_tokens):
    check(num_tokens, TOP_8, dtype=torch.bfloat16, **QWEN3_30B)


@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_gpt_oss_20b_is_the_references(num_tokens):
    check(num_tokens, TOP_4, dtype=torch.bfloat16, **GPT_OSS_20B)


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_a_captured_call_follows_its_inputs(num_tokens):
    routing = ROUTINGS["sigmoid-groups"]
    experts = make_experts(device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(num_tokens, experts.down.shape[1], device="cuda").bfloat16()
    logits, bias = make_logits(num_tokens, routing, device="cuda")
    arguments = (
        hidden, logits, experts.gate_up, experts.down, None, None, bias, routing.top_k,
        routing.is_sigmoid, routing.is_normed, routing.scaling, routing.num_groups,
        routing.top_groups, experts.alpha, experts.limit,
    )  # fmt: skip
    run = torch.ops.octavo.fused_moe
    run(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(*arguments)
    for seed in (1, 2):
        hidden.copy_(torch.randn_like(hidden))
        logits.copy_(make_logits(num_tokens, routing, device="cuda", seed=seed)[0])
        graph.replay()
        assert torch.equal(output, run(*arguments))


def test_all_tokens_may_choose_the_same_experts():
    routing = ROUTINGS["softmax"]
    experts = make_experts(device="cuda", dtype=torch.float16)
    ids = torch.tensor([[2, 0, NUM_EXPERTS - 1]], device="cuda").expand(200, 3).contiguous()
    weights = torch.rand(200, routing.top_k, device="cuda")
    hidden = torch.randn(200, experts.down.shape[1], device="cuda").half()
    from models.ops.triton.moe import apply_experts

    exact = reference.apply_experts(
        hidden.double().cpu(), weights.double().cpu(), ids.cpu(), exactly(experts)
    )
    assert_rows_close(apply_experts(hidden, weights, ids.int(), experts), exact)
