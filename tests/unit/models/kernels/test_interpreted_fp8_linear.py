"""The FP8 product in Triton's interpreter, on the CPU, from activations that it rounded itself.

The interpreter rounds to FP8 without carrying into the exponent; only a GPU can test that part.
"""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
from models.kernels.elementwise import rms_norm as norms
from models.kernels.elementwise import silu_and_mul as gates
from models.kernels.products.fp8.fp8_linear import BLOCK, fp8_block_linear, quantize

torch.manual_seed(0)
torch.set_num_threads(1)

def quantized(x, is_blocked):
    return [each.float() for each in quantize(x, BLOCK if is_blocked else x.shape[1])]

for size in (96, 256, 300):
    x, residual = torch.randn(2, 5, size)
    parts, gain = torch.randn(3, 5, size), torch.randn(size)
    for is_blocked in (True, False):
        rounded = norms.rounded_rms_norm(x, gain, 1e-6, is_blocked=is_blocked)
        expected = quantized(norms.rms_norm(x, gain, 1e-6), is_blocked)
        assert all(torch.equal(a.float(), b) for a, b in zip(rounded, expected, strict=True))
        first, second = residual.clone(), residual.clone()
        rounded = norms.add_rounded_rms_norm(parts, first, gain, 1e-6, is_blocked=is_blocked)
        expected = quantized(norms.add_rms_norm(parts, second, gain, 1e-6, rounds=True), is_blocked)
        assert all(torch.equal(a.float(), b) for a, b in zip(rounded, expected, strict=True))
        assert torch.equal(first, second)
    for is_blocked in (True, False):
        gate_up = torch.randn(5, 2 * size)
        rounded = gates.rounded_silu_and_mul(gate_up, is_blocked=is_blocked)
        expected = quantized(gates.silu_and_mul(gate_up), is_blocked)
        assert all(torch.equal(a.float(), b) for a, b in zip(rounded, expected, strict=True))
SHAPES = [(1, 128, 128), (7, 200, 96), (17, 384, 200), (40, 256, 130), (70, 100, 300)]
for num_rows, size, num_columns in SHAPES:
    x = torch.randn(num_rows, size)
    weight = torch.randn(num_columns, size).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-num_columns // BLOCK), -(-size // BLOCK)) + 0.5
    rounded, x_scale = quantize(x, BLOCK)
    amax = torch.stack([group.abs().amax(-1) for group in x.split(BLOCK, -1)], -1)
    torch.testing.assert_close(x_scale, amax / 448)
    rows, columns = torch.arange(num_columns) // BLOCK, torch.arange(size) // BLOCK
    exact_x = rounded.double() * x_scale.double()[:, columns]
    exact_weight = weight.double() * scale.double()[rows][:, columns]
    for bias in (None, torch.randn(num_columns)):
        exact = exact_x @ exact_weight.t() + (0 if bias is None else bias)
        output = fp8_block_linear(rounded, x_scale, weight, scale, bias, x.dtype)
        torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-4)
"""


@pytest.mark.slow
def test_product_agrees_with_exact_arithmetic_in_the_interpreter():
    run_interpreted(PROGRAM)
