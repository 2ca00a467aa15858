"""The kernels of adapters on a GPU equal the reference, also in a graph whose slots change."""

import pytest
import torch

from models.ops.products.add_adapters import add_slots
from tests.support.adapter_case import CASES, make_adapter_case
from tests.support.tolerances import assert_rows_close

pytestmark = pytest.mark.gpu

SIZES = [*CASES, (1, 4096, (4096, 1024, 1024), 64), (300, 4096, (12288, 12288), 256)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", SIZES)
def test_kernels_equal_the_reference(case, dtype):
    product, x, a, b, parts, slots = make_adapter_case(*case, dtype=dtype, device="cuda")
    host = [each.cpu().double() for each in (product, x, a, b)]
    exact = add_slots(*host, parts, slots.cpu())
    assert_rows_close(add_slots(product, x, a, b, parts, slots).cpu(), exact)


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
