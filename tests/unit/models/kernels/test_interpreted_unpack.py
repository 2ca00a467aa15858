"""The kernel that unpacks weights of 4 and 8 bits, in Triton's interpreter on the CPU."""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
from models.operands.packed_weights import packed_values
from tests.support.packed_quantization import quantize_packed
from models.kernels.products.packed.unpack import unpack

torch.manual_seed(0)
for rows, columns in ((3, 64), (9, 320)):
    for group, options in (
        (32, {}), (columns, {"has_zeros": True}), (32, {"is_float": True}),
        (16, {"is_float": True}), (32, {"has_zeros": True, "num_bits": 8}),
        (columns, {"num_bits": 8}),
    ):
        packed = quantize_packed(torch.randn(rows, columns), group, **options)
        for dtype in (torch.float32, torch.float16):
            torch.testing.assert_close(unpack(*packed, dtype), packed_values(*packed, dtype))
"""


@pytest.mark.slow
def test_unpacked_values_are_the_references():
    run_interpreted(PROGRAM)
