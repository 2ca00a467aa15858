"""The kernels of adapters in Triton's interpreter equal the reference."""

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
torch.set_num_threads(1)
from models.kernels.products.add_adapters import add_adapters
from models.ops.products.add_adapters import add_slots
from tests.support.adapter_case import CASES, make_adapter_case
from tests.support.tolerances import assert_rows_close

for dtype in (torch.float32, torch.float16):
    for case in CASES:
        product, x, a, b, parts, slots = make_adapter_case(*case, dtype=dtype)
        exact = add_slots(product.double(), x.double(), a.double(), b.double(), parts, slots)
        assert_rows_close(add_adapters(product, x, a, b, parts, slots), exact)
        none = add_adapters(product, x, a, b, parts, torch.zeros_like(slots))
        assert torch.equal(none, product)
"""


def test_both_kernels_equal_the_reference():
    run_interpreted(PROGRAM)
