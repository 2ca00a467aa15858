"""Attention that rounds its output: bits of a separate rounding, and of the product after it."""

from dataclasses import replace

import pytest
import torch

from models.layers.quantization import can_run_fp8
from models.number_formats import BLOCK, FP8
from models.operands.rounded_activations import rounded_parts
from models.ops.products.fp8_linear import round_in_place
from models.ops.products.linear import linear
from models.ops.products.linear_residual import linear_residual_norm
from tests.support.attention_case import Heads, make_case

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HEADS = {
    "8b": Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    "group-of-5": Heads(num_heads=10, num_kv_heads=2, head_dim=128),
    "one-kv-head": Heads(num_heads=12, num_kv_heads=1, head_dim=128),
}
BATCHES = {
    "decode": ([1] * 7, [5, 1, 0, 900, 16, 4000, 33]),
    "many-decodes": ([1] * 130, [50 + i for i in range(130)]),
    "mixed": ([1, 300, 1, 33, 0, 2, 1, 501], [40, 300, 5000, 1033, 0, 700, 129, 513]),
    "first-chunk": ([1025], [1025]),
    "two": ([2], [9]),
    "few-after-many": ([5, 1], [5000, 40]),
}
OPTIONS = {
    "plain": {},
    "no-norm": {"has_norm": False},
    "fp8-cache": {"has_fp8_cache": True},
    "window-and-sinks": {"sliding_window": 40, "has_sinks": True},
    "soft-cap": {"soft_cap": 5.0},
    "not-rotated": {"has_rotation": False},
}


@pytest.fixture(autouse=True)
def _hopper():
    if not can_run_fp8(CUDA):
        pytest.skip("this GPU has no FP8 products")


def attended(case, *, rounds):
    output = torch.zeros(case.q.shape, dtype=case.q.dtype, device=CUDA)
    replace(case, rounds=rounds).run_into(output)
    return output


def assert_same_parts(output, expected):
    for part, each in zip(rounded_parts(output), rounded_parts(expected), strict=True):
        part, each = (x.contiguous().view(torch.uint8) for x in (part, each))
        assert torch.equal(part, each)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_kernel_rounds_as_a_launch_of_its_own(options, batch, heads, dtype):
    case = make_case(*batch, heads, dtype=dtype, device="cuda", **options)
    expected = attended(case, rounds=False)
    round_in_place(expected)
    assert_same_parts(attended(case, rounds=True), expected)
    assert case.metadata.workspace.counters.count_nonzero() == 0


@pytest.mark.parametrize(
    ("lens", "dtype"),
    [([70], torch.bfloat16), ([70, 9], torch.float32)],
    ids=["a single token", "float32"],
)
def test_what_no_product_reads_rounded_stays_as_it_is(lens, dtype):
    case = make_case([1] * len(lens), lens, HEADS["8b"], dtype=dtype, device="cuda")
    assert torch.equal(attended(case, rounds=True), attended(case, rounds=False))


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_the_product_has_the_bits_of_one_that_rounds(batch):
    case = make_case(*batch, HEADS["8b"], dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(1024, 32 * BLOCK, device=CUDA).to(FP8)
    scale = torch.rand(8, 32, device=CUDA) + 0.5
    gain = torch.rand(1024, device=CUDA).bfloat16()
    plain, rounded = (attended(case, rounds=rounds).flatten(1) for rounds in (False, True))
    stream = torch.randn(len(plain), 1024, device=CUDA).bfloat16()
    assert torch.equal(
        linear(rounded, weight, None, scale, True), linear(plain, weight, None, scale)
    )
    sums = [stream.clone(), stream.clone()]
    normed = [
        linear_residual_norm(total, x, weight, None, gain, 1e-6, scale, x is rounded)
        for total, x in zip(sums, (plain, rounded), strict=True)
    ]
    assert torch.equal(*sums)
    assert torch.equal(*normed)


@pytest.mark.parametrize("batch", [BATCHES["decode"], BATCHES["mixed"]], ids=["decode", "mixed"])
def test_a_graph_replays_the_rounding(batch):
    case = make_case(*batch, HEADS["8b"], dtype=torch.bfloat16, device="cuda")
    expected = attended(case, rounds=True)
    output, rounding = torch.empty_like(expected), replace(case, rounds=True)
    rounding.run_into(output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rounding.run_into(output)
    output.zero_()
    graph.replay()
    assert_same_parts(output, expected)
