"""The reference of the FP8 products, against float64 arithmetic, and their operator."""

import pytest
import torch

from models.number_formats import BLOCK, FP8
from models.ops.products.fp8_linear import quantize
from models.ops.products.linear import linear
from tests.support.tolerances import assert_rows_close

generator = torch.Generator().manual_seed(11)
PRODUCT_ERROR = 0.05
"""Largest error from rounding activations to four significant bits, relative to the norm."""


def random(*shape):
    return torch.randn(*shape, generator=generator)


def block_case(num_rows, size, num_columns):
    weight = random(num_columns, size).to(FP8)
    scale = torch.rand(-(-num_columns // BLOCK), -(-size // BLOCK), generator=generator) + 0.5
    return random(num_rows, size), weight, scale


def block_weight(weight, scale):
    """Multiplies a weight out, element by element of its blocks."""
    rows = torch.arange(weight.shape[0]) // BLOCK
    columns = torch.arange(weight.shape[1]) // BLOCK
    return weight.double() * scale.double()[rows[:, None], columns[None, :]]


def relative_error(actual, exact):
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("rows", "size", "columns"), [(1, 128, 128), (7, 200, 96), (3, 384, 300)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_block_product_is_near_the_exact_one(rows, size, columns, has_bias):
    x, weight, scale = block_case(rows, size, columns)
    bias = random(columns) if has_bias else None
    exact = x.double() @ block_weight(weight, scale).t() + (0 if bias is None else bias)
    assert relative_error(linear(x, weight, bias, scale), exact) < PRODUCT_ERROR


@pytest.mark.parametrize("has_bias", [False, True])
def test_row_product_is_near_the_exact_one(has_bias):
    x, weight = random(5, 208), random(96, 208).to(FP8)
    scale = torch.rand(96, 1, generator=generator) + 0.5
    bias = random(96) if has_bias else None
    exact = x.double() @ (weight.double() * scale).t() + (0 if bias is None else bias)
    assert relative_error(linear(x, weight, bias, scale), exact) < PRODUCT_ERROR


def test_products_of_what_fp8_holds_are_exact():
    x = torch.randint(-7, 8, (4, 256), generator=generator).float()
    x[:, [0, 128]] = 448.0
    weight = torch.randint(-7, 8, (32, 256), generator=generator).float()
    expected = x @ weight.t()
    blocks, rows = torch.ones(1, 2), torch.ones(32, 1)
    assert torch.equal(linear(x, weight.to(FP8), None, blocks), expected)
    assert torch.equal(linear(x, weight.to(FP8), None, rows), expected)


@pytest.mark.parametrize("group_size", [16, 100, 128, 200])
def test_rounding_uses_the_whole_range_of_each_group(group_size):
    x = random(3, 200) * torch.logspace(-8, 4, 200)
    rounded, scale = quantize(x, group_size)
    assert scale.shape == (3, -(-200 // group_size))
    for index, group in enumerate(x.split(group_size, dim=-1)):
        part = rounded[:, index * group_size : (index + 1) * group_size].float()
        assert (part.abs().amax(-1) == 448).all()
        assert relative_error(part * scale[:, index : index + 1], group.double()) < PRODUCT_ERROR


def test_zeros_stay_zeros():
    x = torch.zeros(2, 256)
    rounded, scale = quantize(x, BLOCK)
    assert not rounded.float().any()
    assert scale.isfinite().all()


@pytest.mark.parametrize("is_blocked", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_token_of_bfloat16_is_not_rounded(is_blocked, has_bias):
    x, weight, scale = block_case(1, 200, 96)
    if not is_blocked:
        scale = torch.rand(96, 1, generator=generator) + 0.5
    x = x.to(torch.bfloat16)
    bias = random(96).to(torch.bfloat16) if has_bias else None
    values = block_weight(weight, scale) if is_blocked else weight.double() * scale
    exact = x.double() @ values.t() + (0 if bias is None else bias.double())
    assert_rows_close(linear(x, weight, bias, scale), exact)
    # One token more is rounded.
    more = torch.cat((x, x))
    error = relative_error(linear(more, weight, bias, scale)[:1], exact)
    assert 0.01 < error < PRODUCT_ERROR


@pytest.mark.parametrize("is_blocked", [False, True])
def test_operator_keeps_its_promises_to_a_compiler(is_blocked):
    x, weight, scale = block_case(3, 256, 128)
    scale = scale if is_blocked else torch.ones(128, 1)
    for bias in (None, random(128)):
        torch.library.opcheck(
            torch.ops.octavo.linear.default,
            (x, weight, bias, scale),
            test_utils=("test_faketensor",),
        )
