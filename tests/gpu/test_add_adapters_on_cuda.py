"""The kernels of adapters on a GPU equal the reference, also in a graph whose slots change."""

import pytest
import torch

from models.kernels.products.add_adapters import add_adapters
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.adapted_linear import product_or_addends
from models.ops.products.add_adapters import add_slots
from tests.support.adapter_case import CASES, make_adapter_case
from tests.support.invariance import batch_invariance
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "rank"), [(QKV, 16), (QKV, 256), (DOWN, 16), ((512, (300, 41)), 64)]
)
def test_a_token_has_the_same_bits_among_any_others_in_batch_invariant_mode(shape, rank, dtype):
    with batch_invariance():
        product, x, a, b, parts, slots = make_adapter_case(
            1200, *shape, rank, dtype=dtype, device="cuda", num_slots=9
        )
        product[::2, ::3] = -0.0

        def bits(rows):
            added = add_slots(product[rows], x[rows], a, b, parts, slots[rows])
            return added.view(torch.int32 if dtype is torch.float32 else torch.int16)

        rows = torch.arange(1200, device="cuda")
        whole = bits(rows)
        exact = add_slots(*(each.cpu().double() for each in (product, x, a, b)), parts, slots.cpu())
        assert_rows_close(whole.view(dtype).cpu(), exact)
        is_without = slots[:1200] == 0
        assert torch.equal(whole.view(dtype)[is_without], product[is_without])
        mixed = torch.randperm(1200, generator=torch.Generator().manual_seed(0)).cuda()
        for count in (1, 2, 15, 16, 17, 32, 33, 64, 65, 200, 512, 513, 1200):
            for chosen in (rows[:count], mixed[:count]):
                assert torch.equal(bits(chosen), whole[chosen])


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
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 32, 64, 100])
def test_a_chain_of_products_in_a_graph_waits_for_each_kernel(num_tokens):
    _, x, a, b, parts, slots = make_adapter_case(
        num_tokens, 4096, (4096,), 16, dtype=torch.bfloat16, device="cuda", num_slots=9
    )
    weight = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") / 64

    def run(waits):
        values = x.contiguous()
        for _ in range(6):
            product, is_late = product_or_addends(values, weight, None, None)
            waits()
            values = add_adapters(product, values, a, b, parts, slots, is_beside=is_late)
            waits()
            # Values of the next product, perhaps where those of an earlier one were.
            values = silu_and_mul(torch.cat([values, values], dim=1))
            waits()
        return values

    expected = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(lambda: None)
    for _ in range(50):
        output.zero_()
        graph.replay()
        assert torch.equal(output, expected)


@torch.inference_mode()
@pytest.mark.parametrize("num_tokens", [1, 32, 100])
def test_a_gate_is_that_of_the_sums(num_tokens):
    product, x, a, b, parts, slots = make_adapter_case(
        num_tokens, 4096, (512, 512), 16, dtype=torch.bfloat16, device="cuda", num_slots=9
    )
    exact = add_slots(*(each.cpu().double() for each in (product, x, a, b)), parts, slots.cpu())
    gate, up = exact.chunk(2, dim=1)
    gated = add_adapters(product, x, a, b, parts, slots, is_gated=True)
    assert_rows_close(gated.cpu(), torch.nn.functional.silu(gate) * up)
