"""Batch-invariant mode on a GPU: the same bits of logits, whatever else is in a step."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from models.kernels.gpu import HOPPER
from models.operands.packed_weights import packed_values
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.linear import linear
from models.ops.products.packed_linear import packed_linear
from scripts.quantize_tiny import FORMATS as PACKED_FORMATS
from scripts.quantize_tiny import write_quantized
from tests.support.adapter_engine import AdapterCase
from tests.support.invariance import (
    FORMATS,
    assert_same_bits,
    batch_invariance,
    make_prompts,
    run,
    run_alone,
    ways,
)
from tests.support.moe_case import (
    ROUTINGS,
    make_experts,
    make_logits,
    make_quantized_experts,
)
from tests.support.mxfp4_checkpoints import pack_experts
from tests.support.packed_quantization import quantize_packed
from tests.support.quantized_checkpoints import LAYER_FORMS, WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
PROMPTS = make_prompts(64)
LONG = [prompt * 40 for prompt in make_prompts(6)]
BF16 = {"device": "cuda", "dtype": torch.bfloat16, "block_size": 16, "num_blocks": 600}
ROOM = {"max_model_len": 2048, "max_num_batched_tokens": 4096}
FEW = ("5 requests", "16 requests", "chunks of 17", "level 3", "FULL on level 3")
COUNTS = (1, 2, 3, 8, 9, 17, 33, 64, 65, 128, 200, 512, 513, 640, 641, 1024)
PACKINGS = {
    "group 128": (128, {}),
    "group 32 with zeros": (32, {"has_zeros": True}),
    "mxfp4": (32, {"is_float": True}),
    "nvfp4": (16, {"is_float": True}),
    "int8 group 128": (128, {"num_bits": 8}),
    "int8 group 32 with zeros": (32, {"has_zeros": True, "num_bits": 8}),
}


@pytest.fixture(autouse=True)
def _mode():
    with batch_invariance():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3", **SHAPE)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    made = {}

    def get(kind):
        if kind not in made:
            options = {**BF16, **FORMATS[kind]}
            made[kind] = run_alone(folder, PROMPTS, **options), options
        return made[kind]

    return get


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("way", ways())
def test_logits_have_the_same_bits_in_every_way(folder, alone, way, kind):
    expected, options = alone(kind)
    assert_same_bits(expected, run(folder, PROMPTS, ways()[way], **options))


@pytest.mark.parametrize("kind", ["bfloat16", "8-bit cache"])
@pytest.mark.parametrize("size", [33, 512, 700, 4096])
def test_long_sequences_have_the_same_bits_in_all_chunks(folder, kind, size):
    options = {**BF16, **FORMATS[kind], **ROOM}
    expected = run_alone(folder, LONG, **options)
    way = ways()["5 requests"]
    options["max_num_batched_tokens"] = size
    assert_same_bits(expected, run(folder, LONG, way, **options))


@pytest.mark.parametrize(
    "variant",
    [
        *("llama", "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "gemma2", "gemma3", "phi3"),
        *("deepseek_v2_groups", "deepseek_v3", "llama4", "mimo_v2"),
    ],
)
def test_families_have_the_same_bits(tmp_path, variant):
    write_checkpoint(tmp_path, variant, hidden_size=256)
    assert_few_ways_agree(tmp_path)


@pytest.mark.parametrize(
    ("variant", "shape"), [("qwen3", SHAPE), ("qwen3_moe", {"hidden_size": 256}), ("gemma3", {})]
)
def test_adapters_have_the_same_bits(tmp_path, variant, shape):
    case = AdapterCase(
        tmp_path, variant, num_adapters=3, with_experts=variant == "qwen3_moe", **shape
    )
    folders = [tmp_path / "adapters" / name for name in case.names]
    prompts = PROMPTS[:24]
    chosen = [[None, *folders][number % 4] for number in range(len(prompts))]
    options = {**BF16, "adapters": folders, "num_adapter_slots": 3}
    expected = run_alone(case.base, prompts, chosen, **options)
    for name in (*FEW, "prefix hits", "drafts", "PIECEWISE on level 3"):
        assert_same_bits(expected, run(case.base, prompts, ways()[name], chosen, **options))
    none = [None] * len(prompts)
    without = run(case.base, prompts, ways()["level 3"], none, **options)
    if variant != "qwen3_moe":  # room for adapters of experts changes how experts round
        assert_same_bits(run_alone(case.base, prompts, none, **BF16), without)
    for index in range(0, len(prompts), 4):
        assert without.tokens[index] == expected.tokens[index]


@pytest.mark.parametrize(
    ("variant", "overrides"), [("qwen3", {}), ("qwen3_moe", {"moe_intermediate_size": 192})]
)
def test_fp8_weights_have_the_same_bits(tmp_path, variant, overrides):
    plain, folder = tmp_path / "plain", tmp_path / "fp8"
    folder.mkdir()
    write_checkpoint(plain, variant, **WIDE, **overrides)
    quantize_checkpoint(plain, folder, "deepseek")
    assert_few_ways_agree(folder)


def test_mxfp4_experts_have_the_same_bits(tmp_path):
    model = write_checkpoint(tmp_path, "gpt_oss", hidden_size=256, intermediate_size=96)
    pack_experts(tmp_path, model)
    assert_few_ways_agree(tmp_path)


@pytest.mark.parametrize("form", LAYER_FORMS)
def test_packed_weights_have_the_same_bits(tmp_path, form):
    shape = WIDE | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    write_checkpoint(tmp_path / "plain", "llama", **shape)
    write_quantized(tmp_path / "plain", tmp_path / "stored", PACKED_FORMATS[form])
    assert_few_ways_agree(tmp_path / "stored")


@pytest.mark.parametrize("form", ["awq", "gptq-zeros", "compressed-int4-32", "compressed-nvfp4"])
def test_experts_of_4_bits_have_the_same_bits(tmp_path, form):
    shape = WIDE | {"moe_intermediate_size": 192}
    write_checkpoint(tmp_path / "plain", "qwen3_moe", **shape)
    write_quantized(tmp_path / "plain", tmp_path / "stored", PACKED_FORMATS[form])
    assert_few_ways_agree(tmp_path / "stored")


def assert_few_ways_agree(folder):
    expected = run_alone(folder, PROMPTS[:16], **BF16)
    for name in FEW:
        assert_same_bits(expected, run(folder, PROMPTS[:16], ways()[name], **BF16))


@pytest.mark.parametrize(
    "shape",
    [
        *((6144, 4096), (4096, 12288), (2048, 4096), (5120, 2048), (1024, 3072)),
        *((8192, 1024), (151936, 1024)),
    ],
)
def test_a_product_has_the_same_rows_for_every_number_of_tokens(shape):
    torch.manual_seed(0)
    x = torch.randn(1100, shape[1], dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(*shape, dtype=torch.bfloat16, device="cuda") / 50
    whole = linear(x, weight, None)
    torch.testing.assert_close(whole, x @ weight.t(), rtol=2e-2, atol=2e-1)
    for count in COUNTS:
        for start in (0, 1100 - count):
            rows = linear(x[start : start + count], weight, None)
            assert torch.equal(rows, whole[start : start + count]), (count, start)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 1280), (12288, 4096)])
def test_a_packed_product_has_the_same_rows_for_every_number_of_tokens(shape, packing):
    torch.manual_seed(0)
    group, options = PACKINGS[packing]
    x = torch.randn(1100, shape[1], dtype=torch.bfloat16, device="cuda")
    packed = quantize_packed(torch.randn(*shape, device="cuda") / 50, group, **options)
    exact = x.float() @ packed_values(*packed, torch.float32).t()
    gate, up = exact.chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    for is_gated, expected in ((False, exact), (True, gated)):
        whole = packed_linear(x, *packed, None, is_gated)
        assert (whole - expected).norm() < 0.01 * expected.norm()
        for count in COUNTS:
            for start in (0, 1100 - count):
                rows = packed_linear(x[start : start + count], *packed, None, is_gated)
                assert torch.equal(rows, whole[start : start + count]), (count, start)
    # A graph fuses the gate or does not.
    plain = packed_linear(x, *packed, None, False)
    assert torch.equal(silu_and_mul(plain), whole)


@pytest.mark.parametrize("shape", [(1024, 512), (4096, 1024), (512, 4096)])
def test_a_product_of_4_bits_waits_for_its_unpacked_weight(shape):
    torch.manual_seed(0)
    x = torch.randn(700, shape[1], dtype=torch.bfloat16, device="cuda")
    weights = [quantize_packed(torch.randn(*shape, device="cuda"), 128) for _ in range(2)]
    expected = [packed_linear(x, *each, None, False) for each in weights]
    torch.cuda.synchronize()
    # Each finds the other's values in the memory that it unpacks to.
    outputs = [packed_linear(x, *weights[turn % 2], None, False) for turn in range(200)]
    for turn, output in enumerate(outputs):
        assert torch.equal(output, expected[turn % 2]), turn


def test_a_product_of_4_bits_may_have_more_than_2_to_the_31_outputs():
    packed = quantize_packed(torch.randn(2**17, 256, device="cuda"), 16, is_float=True)
    x = torch.randn(2**14 + 64, 256, dtype=torch.bfloat16, device="cuda")
    whole = packed_linear(x, *packed, None, False)
    assert torch.equal(whole[-64:], packed_linear(x[-64:], *packed, None, False))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *product(["bfloat16", "fp8", "fp8-rows"], [(256, 128), (512, 768), (136, 200)]),
        *product(["mxfp4", "int4-32", "nvfp4"], [(256, 128), (512, 768), (160, 96)]),
        *product(["int4-128"], [(256, 128), (512, 768)]),
    ],
)
def test_experts_have_the_same_rows_for_every_number_of_tokens(kind, sizes):
    from models.kernels.experts import moe as kernels

    hidden_size, inner = sizes
    is_kept_on_hopper = kind == "nvfp4" or kind.startswith("int4")
    if is_kept_on_hopper and torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("experts in this format stay in 4 bits on Hopper alone")
    options = {"hidden": hidden_size, "inner": inner, "device": "cuda", "dtype": torch.bfloat16}
    if kind == "bfloat16":
        experts = make_experts(**options)
    else:
        experts = make_quantized_experts(kind, **options)
    routing = ROUTINGS["softmax"]
    chosen = kernels.route(*make_logits(300, routing, device="cuda"), routing)
    hidden = torch.randn(300, hidden_size, device="cuda").bfloat16()
    whole = kernels.apply_experts(hidden, *chosen, experts)
    # Pairs alone, and tiles of 16 to 128 rows.
    for count in (1, 2, 3, 20, 50, 100, 250):
        for rows in (slice(0, count), slice(300 - count, 300)):
            part = kernels.apply_experts(hidden[rows], *(each[rows] for each in chosen), experts)
            assert torch.equal(part, whole[rows]), (count, rows)


@pytest.mark.parametrize("count", [1, 5, 40, 300])
def test_whole_experts_of_a_rank_give_a_row_the_same_bits(count):
    from models.kernels.experts import moe as kernels

    experts = make_experts(dtype=torch.bfloat16, device="cuda", hidden=256, inner=128)
    routing, num_experts = ROUTINGS["softmax"], len(experts.down)
    local = replace(
        experts,
        gate_up=experts.gate_up[:4].contiguous(),
        down=experts.down[:4].contiguous(),
        num_routed=num_experts,
    )
    slots = torch.arange(num_experts, dtype=torch.int32, device="cuda").clamp(max=4)
    expert_map = slots[:, None].expand(-1, 3).contiguous()
    load = torch.zeros(num_experts, dtype=torch.int64, device="cuda")
    logits, bias = make_logits(2 * 300, routing, device="cuda")
    hidden = torch.randn(2 * 300, 256, device="cuda").bfloat16()

    def results(rows, counts):
        counts = torch.tensor(counts, dtype=torch.int32, device="cuda")
        chosen = kernels.route(logits[rows], bias, routing, expert_map, load, 4, counts)
        return kernels.apply_experts(hidden[rows], *chosen, local)

    rows = torch.cat([torch.arange(count), 300 + torch.arange(count)])
    together = results(rows, [count, max(1, count // 2)])
    for row in {0, count // 2, count - 1}:
        alone = results(torch.tensor([row, 300 + row]), [1, 0])
        assert torch.equal(together[row], alone[0])
