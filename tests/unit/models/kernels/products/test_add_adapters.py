"""The kernels of adapters in Triton's interpreter equal the reference."""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
torch.set_num_threads(1)
from models.batch_invariance import use_batch_invariance
from models.kernels.products.add_adapters import add_adapters
from models.ops.products.add_adapters import add_slots
from tests.support.adapter_case import CASES, make_adapter_case
from tests.support.tolerances import assert_rows_close

# Nothing may read what no program wrote.
torch.use_deterministic_algorithms(mode=True)

# More tokens than programs share the inputs of.
MANY = (270, 20, (20, 20), 8)
cases = [*((3, case) for case in (*CASES[:7], CASES[8], MANY)), (40, CASES[2])]
for number, (num_slots, case) in enumerate(cases):
    dtype = DTYPES[number % len(DTYPES)]
    arguments = make_adapter_case(*case, dtype=dtype, num_slots=num_slots)
    product, x, a, b, parts, slots = arguments
    exact = add_slots(product.double(), x.double(), a.double(), b.double(), parts, slots)
    together = add_adapters(*arguments)
    assert_rows_close(together, exact)
    none = add_adapters(product, x, a, b, parts, torch.zeros_like(slots))
    assert torch.equal(none, product)
    one = add_adapters(product, x, a, b, parts, torch.full_like(slots, 2))
    is_two = slots[: len(x)] == 2
    assert torch.equal(one[is_two], together[is_two])
    if len(set(parts)) == 1 and len(parts) == 2:
        gate, up = exact.chunk(2, dim=1)
        gated = add_adapters(*arguments, is_gated=True)
        assert_rows_close(gated, torch.nn.functional.silu(gate) * up)
    addends = torch.stack([product.float() - 3, torch.full_like(product, 3).float()])
    assert_rows_close(add_adapters(addends, *arguments[1:]), exact)

# The interpreter computes tiles by NumPy: only a GPU can show that they change no bits.
use_batch_invariance(is_on=True)
for case in (CASES[1], CASES[4], CASES[6], CASES[8], MANY):
    product, x, a, b, parts, slots = make_adapter_case(*case, dtype=torch.float32, num_slots=9)
    product[::2, ::3] = -0.0
    exact = add_slots(product.double(), x.double(), a.double(), b.double(), parts, slots)
    together = add_adapters(product, x, a, b, parts, slots)
    assert_rows_close(together, exact)
    is_without = slots[: len(x)] == 0
    bits, without = together.view(torch.int32), product.view(torch.int32)
    assert torch.equal(bits[is_without], without[is_without])
    for row in range(0, len(x), max(19, len(x) // 4)):
        own = slice(row, row + 1)
        alone = add_adapters(product[own], x[own], a, b, parts, slots[own])
        assert torch.equal(alone.view(torch.int32)[0], bits[row])
"""


@pytest.mark.parametrize(
    "dtypes",
    ["torch.float16, torch.float32", "torch.float32, torch.float16"],
    ids=["first-in-16-bits", "first-in-32-bits"],
)
def test_both_kernels_equal_the_reference(dtypes):
    run_interpreted(f"import torch\nDTYPES = ({dtypes})\n{PROGRAM}")
