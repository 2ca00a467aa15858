"""The kernels of adapters on a GPU equal the reference, also in a graph whose slots change."""

import pytest
import torch

from models.ops.products.add_adapters import add_slots
from models.ops.products.linear import linear
from tests.support.adapter_case import CASES, make_adapter_case
from tests.support.tolerances import assert_rows_close

pytestmark = pytest.mark.gpu

QKV, DOWN = (4096, (4096, 1024, 1024)), (12288, (4096,))
SIZES = [
    *CASES,
    (300, 4096, (12288, 12288), 256),
    *((num_tokens, *QKV, 16) for num_tokens in (1, 2, 17, 32, 64, 128, 256)),
    *((32, *shape, rank) for shape in (QKV, DOWN) for rank in (8, 64, 128, 256)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", SIZES)
def test_kernels_equal_the_reference(case, dtype):
    arguments = make_adapter_case(*case, dtype=dtype, device="cuda", num_slots=9)
    product, x, a, b, parts, slots = arguments
    host = [each.cpu().double() for each in (product, x, a, b)]
    exact = add_slots(*host, parts, slots.cpu())
    assert_rows_close(add_slots(*arguments).cpu(), exact)


def test_a_token_does_not_depend_on_the_adapters_of_others():
    product, x, a, b, parts, slots = make_adapter_case(
        32, *QKV, 16, dtype=torch.bfloat16, device="cuda", num_slots=9
    )
    together = add_slots(product, x, a, b, parts, slots)
    for slot in range(10):
        alike = add_slots(product, x, a, b, parts, torch.full_like(slots, slot))
        is_own = slots[:32] == slot
        assert torch.equal(alike[is_own], together[is_own])


def test_a_graph_takes_new_slots_and_adapters():
    arguments = make_adapter_case(5, 512, (64, 32), 16, dtype=torch.bfloat16, device="cuda")
    product, x, a, b, parts, slots = arguments
    add_slots(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = add_slots(*arguments)
    for _ in range(3):
        slots.copy_(slots.roll(1))
        a.copy_(a.roll(1, dims=0))
        graph.replay()
        assert torch.equal(output, add_slots(product, x, a, b, parts, slots))


@torch.inference_mode()
def test_a_chain_of_products_in_a_graph_waits_for_each_kernel():
    _, x, a, b, parts, slots = make_adapter_case(
        32, 4096, (4096,), 16, dtype=torch.bfloat16, device="cuda", num_slots=9
    )
    weight = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") / 64

    def run(waits):
        values = x.contiguous()
        for _ in range(6):
            product = linear(values, weight, None)
            waits()
            values = add_slots(product, values, a, b, parts, slots)
            waits()
        return values

    expected = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(lambda: None)
    for _ in range(20):
        output.zero_()
        graph.replay()
        assert torch.equal(output, expected)
