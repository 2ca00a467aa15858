"""Weights of 4 and 8 bits: their order, their values, and the reference of their products."""

import pytest
import torch

from models.number_formats import E2M1_VALUES, E8M0
from models.operands.packed_weights import packed_values, to_kernel_order, to_stored_order
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.products.packed_linear import packed_linear
from models.ops.products.packed_residual import packed_linear_residual_norm
from tests.support.invariance import batch_invariance
from tests.support.packed_quantization import quantize_packed
from tests.support.tolerances import assert_rows_close

generator = torch.Generator().manual_seed(3)
FORMATS = {
    "group 32": (32, {}),
    "group 64 with zeros": (64, {"has_zeros": True}),
    "whole rows": (192, {}),
    "mxfp4": (32, {"is_float": True}),
    "nvfp4": (16, {"is_float": True}),
    "int8": (64, {"num_bits": 8}),
    "int8 with zeros": (32, {"num_bits": 8, "has_zeros": True}),
    "int8, whole rows": (192, {"num_bits": 8}),
}
EACH = pytest.mark.parametrize(("group", "options"), FORMATS.values(), ids=FORMATS)


def random(*shape):
    return torch.randn(*shape, generator=generator)


def byte_at(weight, scale, zero, row, column):
    """Reads a value of 8 bits the way a warp does: its word, then its half and its byte."""
    word = int(weight.view(torch.int32)[row, column // 16 * 4 + column % 8 // 2])
    byte = word >> 16 * (column % 2) + 8 * (column % 16 // 8)
    # The last seven bits of a significand, less its first one or, of negative numbers, twice that.
    significand = torch.tensor((0x4300 | byte & 0x7F) << 16, dtype=torch.int32)
    first = torch.tensor((0x4300 | byte & 0x80) << 16, dtype=torch.int32)
    q = float(significand.view(torch.float32) - first.view(torch.float32))
    group = column // (weight.shape[1] // scale.shape[1])
    return (q - (0 if zero is None else int(zero[row, group]))) * float(scale[row, group])


def value_at(weight, scale, zero, row, column):
    """Reads one value the way a warp does: its word, then its half and its four bits."""
    if weight.dtype == torch.int8:
        return byte_at(weight, scale, zero, row, column)
    word = int(weight.view(torch.int32)[row, column // 32 * 4 + column % 8 // 2])
    half, number = word >> 16 * (column % 2), column % 32 // 16 * 2 + column % 16 // 8
    size = 2 * weight.shape[1] // scale.shape[1]
    group = column // size
    if scale.dtype == torch.bfloat16 and size > 16:
        q = half >> 4 * number & 0xF
        return (q - (8 if zero is None else int(zero[row, group]))) * float(scale[row, group])
    scale = scale.view(E8M0) if scale.dtype == torch.uint8 else scale
    sign, lowest = ((15, 6), (12, 3), (14, 0), (13, 9))[number]
    q = (half >> sign & 1) * 8 + (half >> lowest & 7)
    return E2M1_VALUES[q] * float(scale[row, group].float())


@EACH
def test_a_warp_reads_the_values_that_were_stored(group, options):
    values = random(3, 192)
    packed = quantize_packed(values, group, **options)
    exact = packed_values(*packed, torch.float32)
    for column in range(192):
        assert value_at(*packed, 2, column) == pytest.approx(float(exact[2, column]), rel=1e-6)
    assert float((exact - values).norm() / values.norm()) < 0.13


@pytest.mark.parametrize("is_float", [False, True])
def test_kernel_order_is_undone(is_float):
    packed = torch.randint(0, 256, (5, 64), generator=generator, dtype=torch.uint8)
    ordered = to_kernel_order(packed, is_float=is_float)
    assert not torch.equal(ordered, packed)
    assert torch.equal(to_stored_order(ordered, is_float=is_float), packed)
    # A run changes within its 16 bytes.
    run = to_kernel_order(packed[:, 16:32], is_float=is_float)
    assert torch.equal(run, ordered[:, 16:32])
    # Stacked matrices stay in order.
    stacked = to_kernel_order(torch.stack((packed, packed.flip(0))), is_float=is_float)
    assert torch.equal(stacked, torch.stack((ordered, ordered.flip(0))))


def test_kernel_order_of_bytes_is_undone_and_stays_within_16():
    stored = torch.randint(-128, 128, (2, 5, 96), generator=generator, dtype=torch.int8)
    ordered = to_kernel_order(stored)
    assert not torch.equal(ordered, stored)
    assert torch.equal(to_stored_order(ordered), stored)
    assert torch.equal(to_kernel_order(stored[1, :, 16:32]), ordered[1, :, 16:32])


def test_integers_of_8_bits_are_kept_whole():
    numbers = torch.arange(-128, 128, dtype=torch.int8)
    stored = numbers.repeat(2, 1)
    scale = torch.full((2, 1), 0.5, dtype=torch.bfloat16)
    packed = to_kernel_order(stored), scale, None
    assert torch.equal(packed_values(*packed, torch.bfloat16), stored.bfloat16() / 2)
    assert [value_at(*packed, 1, column) for column in range(256)] == [
        number / 2 for number in range(-128, 128)
    ]
    # Differences of integers of 8 bits are exact in bfloat16, too.
    for zero in (-128, 127):
        zeros = torch.full((2, 1), zero, dtype=torch.int8)
        values = packed_values(packed[0], scale, zeros, torch.bfloat16)
        assert torch.equal(values, (stored.float() - zero).bfloat16() / 2)


@EACH
@pytest.mark.parametrize("num_tokens", [1, 7, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_values(group, options, num_tokens, has_bias):
    packed = quantize_packed(random(40, 192), group, **options)
    x, bias = random(num_tokens, 192), random(40) if has_bias else None
    exact = x.double() @ packed_values(*packed, torch.float32).double().t()
    exact = exact if bias is None else exact + bias.double()
    assert_rows_close(packed_linear(x, *packed, bias, False), exact)
    gate, up = exact.chunk(2, -1)
    gated = packed_linear(x, *packed, bias, True)
    assert_rows_close(gated, gate * gate.sigmoid() * up)


@EACH
@pytest.mark.parametrize("is_gated", [False, True])
def test_in_batch_invariant_mode_a_row_has_the_bits_that_it_has_alone(group, options, is_gated):
    packed = quantize_packed(random(40, 192), group, **options)
    x, bias = random(7, 192), random(40)
    with batch_invariance():
        together = packed_linear(x, *packed, bias, is_gated)
        for row in range(len(x)):
            alone = packed_linear(x[row : row + 1].clone(), *packed, bias, is_gated)
            assert torch.equal(together[row], alone[0])


@EACH
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_a_product_may_be_added_to_the_stream_whose_norm_follows(group, options, num_tokens):
    packed = quantize_packed(random(40, 192), group, **options)
    x, residual, gain, bias = (
        random(num_tokens, 192), random(num_tokens, 40), random(40), random(40)
    )  # fmt: skip
    expected = residual + packed_linear(x, *packed, bias, False)
    stream = residual.clone()
    normed = packed_linear_residual_norm(stream, x, *packed, bias, gain, 1e-6)
    assert_rows_close(stream, expected)
    assert_rows_close(normed, rms_norm(expected, gain, 1e-6))


def test_the_sum_and_its_norm_keep_their_promises_to_a_compiler():
    packed = quantize_packed(random(40, 192), 32, has_zeros=True)
    operator = torch.ops.octavo.packed_linear_residual_norm.default
    torch.library.opcheck(
        operator, (random(3, 40), random(3, 192), *packed, random(40), random(40), 1e-6)
    )
    assert {each.name for each in operator._schema.arguments if each.is_write} == {"residual"}


@pytest.mark.parametrize("is_gated", [False, True])
def test_operator_keeps_its_promises_to_a_compiler(is_gated):
    packed = quantize_packed(random(40, 192), 32, has_zeros=True)
    torch.library.opcheck(
        torch.ops.octavo.packed_linear.default, (random(3, 192), *packed, random(40), is_gated)
    )


@pytest.mark.parametrize("is_float", [False, True])
def test_numbers_that_four_bits_hold_are_kept(is_float):
    numbers = torch.tensor(E2M1_VALUES[:8] if is_float else [-7.0, -3, -1, 0, 1, 2, 5, 7])
    values = numbers.repeat(2, 12) * 0.25
    packed = quantize_packed(values, 32, is_float=is_float)
    assert_rows_close(packed_values(*packed, torch.float32), values, 4e-3)
