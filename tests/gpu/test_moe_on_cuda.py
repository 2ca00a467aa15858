"""Experts' kernels against float64 references: every dtype, real and odd shapes, replay."""

from functools import partial

import pytest
import torch

from models.kernels.experts.expert_forms import COMMON, OF_8_BITS, are_few
from models.kernels.gpu import HOPPER
from models.number_formats import BLOCK, FP8
from models.operands.experts import Routing
from models.ops.experts import moe as reference
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
from tests.support.tolerances import (
    FP8_EXPERTS_ERROR,
    FP8_PRODUCT_ROW_TOLERANCE,
    FP8_ROW_TOLERANCE,
    ROW_TOLERANCE,
    assert_rows_close,
)

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ROW_TOLERANCE, ids=str)
TOP_8 = Routing(top_k=8, is_sigmoid=False, is_normed=True, scaling=1.0, num_groups=1, top_groups=1)
TOP_4 = Routing(top_k=4, is_sigmoid=False, is_normed=True, scaling=1.0, num_groups=1, top_groups=1)
QWEN3_30B = {"num_experts": 128, "hidden": 2048, "inner": 768}
MAKERS = {
    "plain": make_experts,
    "fp8": partial(make_quantized_experts, "fp8"),
    "mxfp4": partial(make_quantized_experts, "mxfp4"),
    "int4": partial(make_quantized_experts, "int4-32"),
    "nvfp4": partial(make_quantized_experts, "nvfp4"),
}
GPT_OSS_20B = {"num_experts": 32, "hidden": 2880, "inner": 2880, "is_clamped": True}


def need_kernels(kind):
    """Skips a test of a format of 4 bits where experts are dequantised instead."""
    is_kept_on_hopper = kind == "nvfp4" or kind.startswith("int4")
    if is_kept_on_hopper and torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("experts in this format stay in 4 bits on Hopper alone")


def check(num_tokens, routing, *, dtype, **shape):
    # Triton is imported where it is used: collecting these tests needs none.
    from models.kernels.experts import moe as kernels
    from models.kernels.experts.moe_grouped import apply_grouped
    from models.kernels.experts.moe_pairs import apply_pairs

    experts = make_experts(dtype=dtype, device="cuda", **shape)
    num_experts, hidden_size, _ = experts.down.shape
    logits, bias = make_logits(num_tokens, routing, num_experts=num_experts, device="cuda")
    weights, ids = kernels.route(logits, bias, routing)
    expected_weights, expected_ids = reference.route(logits, bias, routing)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights)
    hidden = torch.randn(num_tokens, hidden_size, device="cuda").to(dtype)
    exact = exact_output(experts, (hidden, weights, expected_ids))
    for apply in (apply_pairs, apply_grouped):
        actual, again = torch.empty_like(hidden), torch.empty_like(hidden)
        for output in (actual, again):
            apply(hidden, weights, ids, experts, output)
        assert_rows_close(actual, exact)
        assert torch.equal(actual, again)
    actual = kernels.apply_experts(hidden, weights, ids, experts)
    assert_rows_close(actual, exact)
    assert torch.equal(actual, kernels.apply_experts(hidden, weights, ids, experts))


def test_chunks_of_a_long_step_compute_what_each_token_would_alone(monkeypatch):
    from models.kernels.experts import moe as kernels
    from models.kernels.experts import token_chunks

    routing = ROUTINGS["softmax"]
    experts = make_experts(dtype=torch.bfloat16, device="cuda", hidden=256, inner=128)
    weights, ids = kernels.route(*make_logits(700, routing, device="cuda"), routing)
    hidden = torch.randn(700, 256, device="cuda").bfloat16()
    whole = kernels.apply_experts(hidden, weights, ids, experts)
    each = token_chunks.scratch_bytes(1, top_k=3, itemsize=2, experts=experts)
    monkeypatch.setattr(token_chunks, "MOST_SCRATCH_BYTES", 256 * each)
    assert_rows_close(kernels.apply_experts(hidden, weights, ids, experts), whole)


@DTYPES
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("num_tokens", [1, 7, 33, 60, 300])
def test_odd_experts_are_the_references(num_tokens, routing, dtype):
    check(num_tokens, routing, dtype=dtype, is_clamped=num_tokens == 7)


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 128, 200, 400, 700])
def test_qwen3_30b_is_the_references(num_tokens):
    check(num_tokens, TOP_8, dtype=torch.bfloat16, **QWEN3_30B)


@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_gpt_oss_20b_is_the_references(num_tokens):
    check(num_tokens, TOP_4, dtype=torch.bfloat16, **GPT_OSS_20B)


def quantized_case(kind, num_tokens, routing, *, dtype, **shape):
    """Returns experts, and what the kernels are called with."""
    experts = make_quantized_experts(kind, dtype=dtype, device="cuda", **shape)
    num_experts, hidden_size, _ = experts.down.shape
    logits, bias = make_logits(num_tokens, routing, num_experts=num_experts, device="cuda")
    weights, ids = reference.route(logits, bias, routing)
    hidden = torch.randn(num_tokens, hidden_size, device="cuda").to(dtype)
    return experts, (hidden, weights, ids.int())


def exact_output(experts, call):
    """Returns what the reference makes of the same call in float64.

    It has one expert at a time: all of a large model's would take 11 GB in float64.
    """
    hidden, weights, ids = call
    output = torch.zeros_like(hidden, dtype=torch.float64)
    for expert in ids.unique().tolist():
        others = (ids != expert).long()
        own = exactly(part_of(experts, [expert]))
        output += reference.apply_experts(hidden.double(), weights.double(), others, own)
    return output


def check_packed(kind, num_tokens, routing, *, dtype=torch.bfloat16, **shape):
    from models.kernels.experts.moe import apply_experts

    need_kernels(kind)
    experts, call = quantized_case(kind, num_tokens, routing, dtype=dtype, **shape)
    actual = apply_experts(*call, experts)
    assert actual.dtype == dtype
    assert_rows_close(actual, exact_output(experts, call))
    assert torch.equal(actual, apply_experts(*call, experts))


def values(rounded, scale):
    """Returns rounded activations [T, K] in float64."""
    scale = scale.double().repeat_interleave(BLOCK, 1)
    return rounded.double() * scale[:, : rounded.shape[1]]


@pytest.fixture
def roundings(monkeypatch):
    """Returns a list that collects the rounded inputs of both products, and the second one's kept.

    The first input is by token. The second product's input is kept in FP8, or rounded where it is
    read.
    """
    from models.kernels.experts.fp8 import fp8_experts, moe_fp8

    noted, quantize, down = [], moe_fp8.quantize, moe_fp8._down_kernel
    multiply = fp8_experts._multiply

    def note(x, group_size):
        result = quantize(x, group_size)
        noted.append(values(*result))
        return result

    class Noting:
        def __getitem__(self, grid):
            def launch(between, scale, *others, **options):
                is_rounded = between.dtype == FP8
                noted.append(
                    values(between, scale) if is_rounded else values(*quantize(between, BLOCK))
                )
                noted.append((between, is_rounded))
                return down[grid](between, scale, *others, **options)

            return launch

    def note_rows(product, x, x_scale, *others):
        pairs, starts = others[3:5]
        rows = torch.arange(len(x), device="cuda")
        if product.is_alone:
            places, tokens = 4 * rows, rows
        else:
            # Scales of an expert begin at the next multiple of four, four more for each expert.
            expert = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
            first = starts.long()[expert]
            places, tokens = rows - first + (first + 3) // 4 * 4 + 4 * expert, pairs.long()
        kept = values(x, x_scale.t()[places])
        if product.is_gated:
            noted.append(torch.empty_like(kept).index_copy(0, tokens, kept))
        else:
            noted.extend((kept, (x, True)))
        multiply(product, x, x_scale, *others)

    monkeypatch.setattr(moe_fp8, "quantize", note)
    monkeypatch.setattr(moe_fp8, "_down_kernel", Noting())
    monkeypatch.setattr(fp8_experts, "_multiply", note_rows)
    return noted


def check_fp8(roundings, kind, num_tokens, routing, *, dtype, **shape):
    """Compares each product with the exact one of the same rounded values.

    Sums in another order would round some values between the products to their other neighbour.
    """
    from models.kernels.experts.fp8.fp8_experts import takes_experts
    from models.kernels.experts.moe import apply_experts

    experts, call = quantized_case(kind, num_tokens, routing, dtype=dtype, **shape)
    actual = apply_experts(*call, experts)
    assert actual.dtype == dtype
    hidden, rounded_between, (between, is_rounded) = roundings
    ids = call[2].flatten()
    forms = COMMON
    if takes_experts(experts):
        forms, hidden = OF_8_BITS, hidden[:: routing.top_k]
    is_alone = are_few(len(ids), len(experts.down), routing.top_k, forms)
    order = torch.arange(len(ids), device="cuda") if is_alone else ids.argsort(stable=True)
    tolerance = FP8_PRODUCT_ROW_TOLERANCE + ROW_TOLERANCE[dtype]
    gate_up = by_expert(hidden[order // routing.top_k], ids[order], experts, "gate_up")
    gated = experts.activate(gate_up)
    if is_rounded:
        assert_rows_close(rounded_between, gated, tolerance + FP8_ROW_TOLERANCE)
    else:
        assert_rows_close(between, gated, tolerance)
    down = by_expert(rounded_between, ids[order], experts, "down")
    results = torch.empty_like(down)
    results[order] = down * call[1].double().flatten()[order, None]
    assert_rows_close(actual, results.view(num_tokens, routing.top_k, -1).sum(1), tolerance)
    unrounded = exact_output(experts, call)
    assert (actual.double() - unrounded).norm() / unrounded.norm() < FP8_EXPERTS_ERROR
    assert torch.equal(actual, apply_experts(*call, experts))


def by_expert(rows, ids, experts, name):
    """Multiplies each row, in float64, with its expert's matrix of that name."""
    output = rows.new_empty(len(rows), getattr(experts, name).shape[1])
    for expert in ids.unique().tolist():
        own = exactly(part_of(experts, [expert]))
        bias = getattr(own, f"{name}_bias")
        output[ids == expert] = torch.nn.functional.linear(
            rows[ids == expert], getattr(own, name)[0], None if bias is None else bias[0]
        )
    return output


@DTYPES
@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (160, 32)])
@pytest.mark.parametrize("num_tokens", [1, 7, 30, 50, 100, 300])
def test_mxfp4_experts_are_those_of_dequantised_weights(num_tokens, hidden, inner, dtype):
    shape = {"hidden": hidden, "inner": inner, "is_clamped": num_tokens == 7}
    check_packed("mxfp4", num_tokens, ROUTINGS["softmax"], dtype=dtype, **shape)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 8, 32, 64, 100, 200, 300, 1000, 2000])
def test_gpt_oss_20b_in_mxfp4_is_that_of_dequantised_weights(num_tokens):
    check_packed("mxfp4", num_tokens, TOP_4, **GPT_OSS_20B)


@pytest.mark.parametrize(
    ("kind", "hidden", "inner"),
    [
        *(("int4-32", 64, 96), ("int4-32", 160, 32), ("int4-32", 416, 352)),
        *(("int4-64", 64, 192), ("int4-64", 448, 320), ("int4-128", 128, 384)),
        *(("nvfp4", 64, 96), ("nvfp4", 160, 32), ("nvfp4", 416, 352)),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 7, 30, 50, 100, 300, 700])
def test_experts_of_4_bits_are_those_of_dequantised_weights(num_tokens, kind, hidden, inner):
    shape = {"hidden": hidden, "inner": inner, "is_clamped": num_tokens == 7}
    check_packed(kind, num_tokens, ROUTINGS["softmax"], **shape)


@pytest.mark.parametrize("kind", ["int4-128", "nvfp4"])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 32, 64, 100, 200, 600, 2048])
def test_qwen3_30b_in_4_bits_is_that_of_dequantised_weights(num_tokens, kind):
    check_packed(kind, num_tokens, TOP_8, **QWEN3_30B)


@pytest.mark.parametrize("num_tokens", [1, 4, 10, 40, 200])
def test_kimi_k2_is_that_of_dequantised_weights(num_tokens):
    # A few of its experts.
    shape = {"num_experts": 16, "hidden": 7168, "inner": 2048}
    check_packed("int4-32", num_tokens, TOP_8, **shape)


# Each number has tiles of another height on Hopper, but for 16: two of the height of 7.
@pytest.mark.parametrize("kind", ["mxfp4", "int4-32", "nvfp4"])
@pytest.mark.parametrize("num_tokens", [1, 7, 16, 30, 60, 120, 250, 600])
def test_experts_of_4_bits_may_get_all_tokens_or_none(num_tokens, kind):
    from models.kernels.experts.moe import apply_experts

    need_kernels(kind)
    shape = {"hidden": 352, "inner": 288, "is_clamped": True}
    experts, (hidden, weights, ids) = quantized_case(
        kind, num_tokens, ROUTINGS["softmax"], dtype=torch.bfloat16, **shape
    )
    ids = torch.tensor([4, 0, 7], dtype=torch.int32, device="cuda").expand_as(ids).contiguous()
    call = hidden, weights, ids
    assert_rows_close(apply_experts(*call, experts), exact_output(experts, call))


@pytest.mark.parametrize(
    ("kind", "error"),
    [("mxfp4", 1e-2), ("int4-32", 1e-2), ("nvfp4", 1e-2), ("fp8", FP8_EXPERTS_ERROR)],
)
@pytest.mark.parametrize("num_tokens", [1, 7, 16, 60, 600])
def test_ranks_add_up_to_all_quantised_experts(num_tokens, kind, error):
    from models.kernels.experts.moe import apply_experts

    need_kernels(kind)
    experts, (hidden, weights, ids) = quantized_case(
        kind, num_tokens, ROUTINGS["softmax"], dtype=torch.bfloat16, hidden=352, inner=288,
        is_clamped=True,
    )  # fmt: skip
    total = torch.zeros_like(hidden, dtype=torch.float64)
    # One rank has an expert that no token chooses, and no other.
    ids = torch.where(ids == 3, 4, ids)
    for own in (range(3), [3], range(4, NUM_EXPERTS)):
        slots = torch.full((NUM_EXPERTS,), len(own), dtype=torch.int32, device="cuda")
        slots[list(own)] = torch.arange(len(own), dtype=torch.int32, device="cuda")
        chosen = slots[ids.long()].contiguous()
        own_weights = weights * (chosen < len(own))
        part = apply_experts(hidden, own_weights, chosen, part_of(experts, own))
        total += part.double()
    exact = exact_output(experts, (hidden, weights, ids))
    assert ((total - exact).norm() / exact.norm()) < error


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [*(("mxfp4", 3072), ("int4-32", 2304), ("int4-32", 2272)), ("int4-64", 2752), ("nvfp4", 2304)],
)
@pytest.mark.parametrize("num_tokens", [10, 60])
def test_experts_may_be_too_wide_for_the_kernel_of_few_tokens(num_tokens, kind, hidden):
    check_packed(kind, num_tokens, ROUTINGS["softmax"], hidden=hidden, inner=64)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *(("mxfp4", GPT_OSS_20B), ("int4-32", GPT_OSS_20B)),
        *(("int4-128", QWEN3_30B), ("nvfp4", QWEN3_30B)),
    ],
)
def test_bits_of_experts_of_4_bits_do_not_depend_on_the_batch(kind, shape):
    from models.kernels.experts.moe import apply_experts

    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("other GPUs have other kernels")
    experts, call = quantized_case(kind, 1000, TOP_4, dtype=torch.bfloat16, **shape)
    whole = apply_experts(*call, experts)
    # Of up to 4 tokens, the mode alone keeps the order of sums.
    with batch_invariance():
        for num_tokens in (1, 3, 8, 30, 60, 100, 200, 500):
            part = (each[:num_tokens].contiguous() for each in call)
            assert torch.equal(apply_experts(*part, experts), whole[:num_tokens])


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "int4-64", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 32, 60, 120, 250, 500, 1000, 1600])
def test_repeats_of_quantised_experts_have_the_same_bits(num_tokens, kind):
    from models.kernels.experts.moe import apply_experts

    need_kernels(kind)
    experts, call = quantized_case(kind, num_tokens, TOP_4, dtype=torch.bfloat16, **GPT_OSS_20B)
    first = apply_experts(*call, experts)
    num_others = sum((apply_experts(*call, experts) != first).any() for _ in range(50))
    assert num_others == 0


@DTYPES
@pytest.mark.parametrize("kind", ["fp8", "fp8-rows"])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (200, 136), (400, 144)])
# Each has tiles of another height on Hopper.
@pytest.mark.parametrize("num_tokens", [1, 7, 25, 50, 150, 600])
def test_fp8_experts_are_those_of_rounded_activations(
    roundings, num_tokens, hidden, inner, kind, dtype
):
    shape = {"hidden": hidden, "inner": inner, "is_clamped": num_tokens == 7}
    check_fp8(roundings, kind, num_tokens, ROUTINGS["softmax"], dtype=dtype, **shape)


@pytest.mark.parametrize("kind", ["fp8", "fp8-rows"])
@pytest.mark.parametrize("num_tokens", [1, 16, 200])
def test_deepseek_v3_in_fp8_is_that_of_rounded_activations(roundings, num_tokens, kind):
    # An eighth of its experts.
    shape = {"num_experts": 32, "hidden": 7168, "inner": 2048}
    check_fp8(roundings, kind, num_tokens, TOP_8, dtype=torch.bfloat16, **shape)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("num_tokens", [1, 10, 40])
def test_a_captured_call_follows_its_inputs(num_tokens, kind):
    need_kernels(kind)
    routing = ROUTINGS["sigmoid-groups"]
    experts = MAKERS[kind](device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(num_tokens, experts.down.shape[1], device="cuda").bfloat16()
    logits, bias = make_logits(num_tokens, routing, device="cuda")
    arguments = (
        hidden, logits, experts.gate_up, experts.down, None, None,
        experts.gate_up_scale, experts.down_scale, bias, routing.top_k,
        routing.is_sigmoid, routing.is_normed, routing.scaling, routing.num_groups,
        routing.top_groups, experts.alpha, experts.limit, experts.adds_one,
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
    from models.kernels.experts.moe import apply_experts

    exact = exact_output(experts, (hidden, weights, ids))
    assert_rows_close(apply_experts(hidden, weights, ids.int(), experts), exact)
