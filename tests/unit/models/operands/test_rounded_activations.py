"""Activations rounded in their own memory: where the parts are, and the products that read them."""

import pytest
import torch

from models.batch_invariance import use_batch_invariance
from models.number_formats import BLOCK, FP8
from models.operands.rounded_activations import rounded_parts
from models.ops.products.feed_forward import feed_forward
from models.ops.products.fp8_linear import quantize, round_in_place
from models.ops.products.linear import linear
from models.ops.products.linear_residual import (
    linear_residual,
    linear_residual_norm,
    linear_residual_norm_linear,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
SIZE, HIDDEN, INNER = 2 * BLOCK, 3 * BLOCK, BLOCK
EPS = 1e-6
generator = torch.Generator().manual_seed(3)


def weight(*shape):
    """Returns an FP8 weight and its scales by block."""
    grid = [-(-size // BLOCK) for size in shape]
    values = torch.randn(shape, generator=generator).to(FP8)
    return values, torch.rand(grid, generator=generator) + 0.5


(OUT, OUT_SCALE), (DOWN, DOWN_SCALE) = weight(HIDDEN, SIZE), weight(HIDDEN, INNER)
GATE_UP, GATE_UP_SCALE = weight(2 * INNER, HIDDEN)
GAIN = torch.rand(HIDDEN, generator=generator) + 0.5


def written(residual, operator, *args):
    return operator(residual, *args), residual


def products(x, residual, *, is_rounded):
    """Yields what each operator makes of x, and the residual stream after it."""
    gain = GAIN.to(x.dtype)
    out = (x, OUT, None)
    norm, gate = (gain, EPS), (GATE_UP, None)
    flag = [is_rounded]
    after = (*norm, *gate, True, OUT_SCALE, GATE_UP_SCALE)
    yield linear(*out, OUT_SCALE, *flag), residual
    yield written(residual.clone(), linear_residual, *out, OUT_SCALE, *flag)
    yield written(residual.clone(), linear_residual_norm, *out, *norm, OUT_SCALE, *flag)
    yield written(residual.clone(), linear_residual_norm_linear, *out, *after, *flag)
    mlp = (*out, *norm, *gate, DOWN, None, *norm, None, None, False)
    scales = (OUT_SCALE, GATE_UP_SCALE, DOWN_SCALE, None)
    yield written(residual.clone(), feed_forward, *mlp, *scales, *flag)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (5, 2), (8, 2)], ids=str)
def test_values_and_scales_share_the_memory_without_overlap(shape, dtype):
    num_tokens, num_heads = shape
    # The memory before it is another tensor's.
    memory = torch.zeros(num_tokens + 1, num_heads, BLOCK, dtype=dtype)
    x = memory[1:]
    values, scales = rounded_parts(x)
    assert values.shape == (num_tokens, num_heads * BLOCK)
    assert values.is_contiguous()
    assert scales.shape == (num_tokens, num_heads)
    # The copy engine reads the scales of a head side by side, from aligned addresses.
    assert scales.stride(0) == 1
    assert scales.stride(1) * scales.itemsize % 16 == 0
    assert scales.data_ptr() % 16 == values.data_ptr() % 16
    values.copy_(torch.full(values.shape, 2.0))
    scales.copy_(torch.arange(1.0, 1 + scales.numel()).view(scales.shape))
    assert (values.float() == 2.0).all()
    assert torch.equal(scales.flatten(), torch.arange(1.0, 1 + scales.numel()))
    assert memory[0].count_nonzero() == 0


@DTYPES
def test_rounding_in_place_is_the_rounding_of_products(dtype):
    x = torch.randn(5, 3, BLOCK, generator=generator).to(dtype)
    x[2] = 0
    expected = quantize(x.flatten(1), BLOCK)
    round_in_place(x)
    for part, each in zip(rounded_parts(x), expected, strict=True):
        assert torch.equal(part.float(), each.float())
    assert (rounded_parts(x)[1] > 0).all()


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_products_of_rounded_activations_are_those_that_round(num_tokens, dtype):
    x = torch.randn(num_tokens, SIZE, generator=generator).to(dtype)
    residual = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    expected = list(products(x, residual, is_rounded=False))
    # A single token in bfloat16 is left as it is.
    if num_tokens > 1 or dtype is not torch.bfloat16:
        round_in_place(x)
    for mine, its in zip(expected, products(x, residual, is_rounded=True), strict=True):
        for first, second in zip(mine, its, strict=True):
            assert first is second or torch.equal(first, second)


def test_a_padding_row_changes_no_other():
    x = torch.randn(4, SIZE, generator=generator).to(torch.bfloat16)
    residual = torch.randn(4, HIDDEN, generator=generator).to(torch.bfloat16)
    round_in_place(x)
    poisoned = x.clone()
    values, scales = rounded_parts(poisoned)
    values.view(torch.uint8)[3] = 0x7F  # NaN
    scales[3] = torch.nan
    pairs = zip(
        products(x, residual, is_rounded=True),
        products(poisoned, residual, is_rounded=True),
        strict=True,
    )
    for mine, its in pairs:
        for first, second in zip(mine, its, strict=True):
            assert first is None or torch.equal(first[:3], second[:3])


def test_batch_invariant_products_take_activations_as_they_are():
    x = torch.randn(4, SIZE, generator=generator).to(torch.bfloat16)
    use_batch_invariance(is_on=True)
    try:
        assert torch.equal(linear(x, OUT, None, OUT_SCALE, True), linear(x, OUT, None, OUT_SCALE))
    finally:
        use_batch_invariance(is_on=False)
