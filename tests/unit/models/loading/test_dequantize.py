"""Stored 8-bit and 4-bit floats, against plain formulas and transformers."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.loading.dequantize import (
    STRIP_ROWS,
    check_mxfp4,
    dequantize_fp8,
    dequantize_mxfp4,
    normalized_scale,
)

generator = torch.Generator().manual_seed(3)


def all_fp8() -> torch.Tensor:
    """Every finite value, twice, as a [4, 127] matrix."""
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    return torch.tensor(codes * 2, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 127)


def fp8_value(code: int) -> float:
    """Returns the value of a byte: sign, four bits of exponent with bias 7, three of mantissa."""
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 0x80 else size


def fp4_value(code: int) -> float:
    """Returns the value of four bits: sign, two bits of exponent with bias 1, one of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_is_value_times_scale_rounded_once(dtype):
    weight = all_fp8()
    scale = torch.tensor([[0.37], [1.0], [2.5e-3], [1.75]])
    result = dequantize_fp8(weight, scale, None, dtype)
    codes = weight.view(torch.uint8)
    for row in range(4):
        exact = torch.tensor([fp8_value(int(c)) for c in codes[row]], dtype=torch.float32)
        assert torch.equal(result[row], (exact * scale[row]).to(dtype))


@pytest.mark.parametrize(("block", "shape"), [((2, 50), (4, 127)), ((3, 127), (4, 127))])
def test_each_block_has_its_scale_and_the_last_may_be_short(block, shape):
    weight = all_fp8()
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    scale = torch.rand(grid, generator=generator)
    result = dequantize_fp8(weight, scale, block, torch.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            expected = weight[i, j].float() * scale[i // block[0], j // block[1]]
            assert result[i, j] == expected


@pytest.mark.parametrize("block", [(128, 2), (100, 3), None])
def test_matrices_of_many_strips_are_whole(block):
    weight = torch.randn(2 * STRIP_ROWS + 70, 3, generator=generator).to(torch.float8_e4m3fn)
    rows, columns = block or (1, 3)
    scale = torch.rand(-(-len(weight) // rows), -(-3 // columns), generator=generator)
    i, j = torch.arange(len(weight)) // rows, torch.arange(3) // columns
    expected = weight.float() * scale[i[:, None], j[None, :]]
    assert torch.equal(dequantize_fp8(weight, scale, block, torch.float32), expected)


def test_blocks_agree_with_transformers():
    weight = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator)
    reference = Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, scale, torch.bfloat16)
    assert torch.equal(dequantize_fp8(weight, scale, (128, 128), torch.bfloat16), reference)


def test_scales_may_be_powers_of_two_in_a_byte():
    weight = torch.ones(2, 128).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.25, 8.0]]).to(torch.float8_e8m0fnu)
    result = dequantize_fp8(weight, scale, (2, 64), torch.float32)
    assert torch.equal(result, torch.tensor([0.25, 8.0]).repeat_interleave(64).expand(2, 128))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,), (3, 1)])
def test_scales_of_tensors_and_rows_come_in_one_form(shape):
    scale = torch.rand(shape, generator=generator)
    result = normalized_scale(scale, torch.Size((3, 5)), None)
    assert torch.equal(result, scale.reshape(-1, 1).expand(3, 1))


@pytest.mark.parametrize(
    ("shape", "block"),
    [((5,), None), ((1, 3), None), ((3, 5), None), ((1, 1), (2, 4)), ((), (2, 4))],
)
def test_scales_that_do_not_fit_are_refused_with_both_shapes(shape, block):
    with pytest.raises(ValueError, match=r"its shape is .*weight of \(3, 5\)"):
        normalized_scale(torch.ones(shape), torch.Size((3, 5)), block)


def random_mxfp4(num_experts=3, num_rows=6, num_blocks=2):
    blocks = torch.randint(
        256, (num_experts, num_rows, num_blocks, 16), dtype=torch.uint8, generator=generator
    )
    scales = torch.randint(100, 140, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
    return blocks, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_agrees_with_transformers(dtype):
    blocks, scales = random_mxfp4()
    reference = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(dequantize_mxfp4(blocks, scales, dtype), reference)


def test_every_mxfp4_byte_and_exponent_is_exact():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    exact = dequantize_mxfp4(blocks.contiguous(), scales.contiguous(), torch.float32)
    for exponent in range(255):
        for byte in range(256):
            pair = exact[0, 2 * byte : 2 * byte + 2, exponent].tolist()
            for value, code in zip(pair, (byte & 0xF, byte >> 4), strict=True):
                expected = math.ldexp(fp4_value(code), exponent - 127)
                # The largest values of the largest scales are beyond float32.
                is_beyond = abs(expected) > torch.finfo(torch.float32).max
                assert value == (math.copysign(math.inf, expected) if is_beyond else expected)


def test_mxfp4_scale_255_is_not_a_number():
    blocks, scales = random_mxfp4(1, 1, 1)
    scales[:] = 255
    assert dequantize_mxfp4(blocks, scales, torch.bfloat16).isnan().all()


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [
        (torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, dtype=torch.uint8)),
        (torch.zeros(1, 2, 3, 8, dtype=torch.uint8), torch.zeros(1, 2, 3, dtype=torch.uint8)),
        (torch.zeros(1, 2, 3, 16, dtype=torch.uint8), torch.zeros(1, 2, 4, dtype=torch.uint8)),
        (torch.zeros(1, 2, 3, 16, dtype=torch.uint8), torch.zeros(1, 2, 3)),
    ],
)
def test_mxfp4_of_the_wrong_form_is_refused(blocks, scales):
    with pytest.raises(ValueError, match="uint8"):
        check_mxfp4(blocks, scales)


@pytest.mark.parametrize("exponent", [-110, -1, 0, 7, 118])
def test_fp8_with_exponents_is_exact_in_bfloat16(exponent):
    weight = all_fp8()
    scale = torch.full((4, 4), 127 + exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = dequantize_fp8(weight, scale, (1, 32), torch.bfloat16)
    assert torch.equal(values.double(), weight.double() * 2.0**exponent)
