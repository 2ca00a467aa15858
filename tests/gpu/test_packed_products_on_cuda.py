"""Products with weights of 4 and 8 bits against float64 references of their values."""

from itertools import product

import pytest
import torch

from models.kernels.tuning.tiles import PackedTiles
from models.layers.quantization import can_run_packed
from models.operands.packed_weights import packed_values
from models.ops.products.packed_linear import packed_linear
from models.ops.products.packed_residual import packed_linear_residual_norm
from tests.support.packed_quantization import quantize_packed
from tests.support.tolerances import assert_rows_close

pytestmark = pytest.mark.gpu

GATED = pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
FORMATS = {
    "32": (32, {}),
    "64 zeros": (64, {"has_zeros": True}),
    "128": (128, {}),
    "512 zeros": (512, {"has_zeros": True}),
    "channel": (None, {}),
    "mxfp4": (32, {"is_float": True}),
    "nvfp4": (16, {"is_float": True}),
    "int8 32 zeros": (32, {"num_bits": 8, "has_zeros": True}),
    "int8 128": (128, {"num_bits": 8}),
    "int8 channel": (None, {"num_bits": 8}),
    "int8 channel zeros": (None, {"num_bits": 8, "has_zeros": True}),
}
ALL_FORMATS = pytest.mark.parametrize("form", FORMATS)
WIDE = [
    PackedTiles(tokens=tokens, groups=groups, slots=slots, programs=programs)
    for tokens, groups, slots, programs in [
        (128, 1, 6, 1), (128, 2, 5, 1), (128, 3, 5, 1), (256, 2, 3, 1), (32, 2, 6, 2), (64, 2, 4, 2)
    ]
]  # fmt: skip
WIDE_BYTES = [
    PackedTiles(tokens=tokens, groups=groups, slots=slots, programs=programs)
    for tokens, groups, slots, programs in [
        (128, 1, 5, 1), (128, 2, 4, 1), (128, 3, 3, 1), (256, 2, 2, 1), (64, 2, 3, 2)
    ]
]  # fmt: skip


def make_weight(num_rows, num_inputs, form):
    """Returns a weight with its scales, and its values in float64."""
    group, options = FORMATS[form]
    values = torch.randn(num_rows, num_inputs, device="cuda") * num_inputs**-0.5
    packed = quantize_packed(values, group or num_inputs, **options)
    return packed, packed_values(*packed, torch.float32).double()


def reference(x, exact, bias, *, is_gated):
    expected = x.double() @ exact.t()
    if bias is not None:
        expected += bias.double()
    if is_gated:
        gate, up = expected.chunk(2, -1)
        expected = gate * gate.sigmoid() * up
    return expected


def check(size, form, counts, *, is_gated):
    num_outputs, num_inputs = size
    packed, exact = make_weight(num_outputs * (2 if is_gated else 1), num_inputs, form)
    for num_tokens in counts:
        x = torch.randn(num_tokens, num_inputs, device="cuda").bfloat16()
        expected = reference(x, exact, None, is_gated=is_gated)
        assert_rows_close(packed_linear(x, *packed, None, is_gated), expected)


@GATED
@ALL_FORMATS
@pytest.mark.parametrize("size", [(4096, 4096), (40, 1024), (1600, 1536), (1000, 512)], ids=str)
def test_packed_weights_are_multiplied_as_their_values(size, form, is_gated):
    check(size, form, (1, 2, 3, 8, 9, 17, 33, 64, 65, 300), is_gated=is_gated)


@pytest.mark.parametrize("form", ["128", "int8 128", "int8 32 zeros", "int8 channel"])
def test_gated_products_of_many_outputs_are_those_of_the_values(form):
    check((14336, 768), form, (8, 16, 32, 64), is_gated=True)


@ALL_FORMATS
@pytest.mark.parametrize(
    "size", [(4096, 4096), (40, 1024), (1000, 512), (2560, 9728), (5120, 17408)], ids=str
)
def test_sums_with_the_stream_and_their_norms_are_those_of_the_values(size, form):
    num_outputs, num_inputs = size
    packed, exact = make_weight(num_outputs, num_inputs, form)
    gain = torch.rand(num_outputs, device="cuda").bfloat16() + 0.5
    for num_tokens in (1, 2, 8, 9, 17, 33, 64, 65, 300):
        bias = torch.randn(num_outputs, device="cuda").bfloat16() if num_tokens % 2 else None
        x = torch.randn(num_tokens, num_inputs, device="cuda").bfloat16()
        residual = torch.randn(num_tokens, num_outputs, device="cuda").bfloat16()
        expected = residual.double() + reference(x, exact, bias, is_gated=False)
        normed = packed_linear_residual_norm(residual, x, *packed, bias, gain, 1e-6)
        assert_rows_close(residual, expected)
        scale = (expected.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        assert_rows_close(normed, expected * scale * gain.double())


@GATED
@ALL_FORMATS
def test_products_of_many_tokens_are_those_of_the_values(form, is_gated):
    counts = (65, 80, 96, 112, 128, 200, 256, 384, 640, 1000, 2048)
    check((6144, 1024), form, counts, is_gated=is_gated)


@GATED
@pytest.mark.parametrize("form", ["32", "nvfp4", "int8 32 zeros"])
@pytest.mark.parametrize("size", [(1600, 1536), (9000, 1056), (1001, 512)], ids=str)
def test_products_of_many_tokens_take_odd_sizes(size, form, is_gated):
    check(size, form, (65, 100, 129, 200, 1000), is_gated=is_gated)


@ALL_FORMATS
def test_unpacking_a_weight_gives_its_values(form):
    from models.kernels.products.packed.unpack import unpack

    packed, exact = make_weight(1000, 512, form)
    assert torch.equal(unpack(*packed, torch.float32).double(), exact)


@GATED
@pytest.mark.parametrize("form", ["128", "nvfp4", "int8 128"])
def test_a_bias_is_added_before_the_gate(form, is_gated):
    packed, exact = make_weight(13824, 1024, form)
    bias = torch.randn(13824, device="cuda").bfloat16()
    for num_tokens in (1, 24, 80, 200, 600):
        x = torch.randn(num_tokens, 1024, device="cuda").bfloat16()
        expected = reference(x, exact, bias, is_gated=is_gated)
        assert_rows_close(packed_linear(x, *packed, bias, is_gated), expected)


@GATED
@pytest.mark.parametrize(
    ("form", "tiles"),
    [
        *product(["64 zeros", "nvfp4"], WIDE),
        *product(["int8 128", "int8 32 zeros"], WIDE_BYTES),
    ],
    ids=str,
)
def test_tiles_that_share_inputs_take_any_size(tiles, form, is_gated):
    if not can_run_packed(torch.device("cuda"), torch.bfloat16):
        pytest.skip("this GPU has no products of packed weights")
    from models.kernels.products.packed.packed_wide_linear import packed_wide_linear

    for num_rows, num_inputs in ((1008, 1536), (34832, 512)):
        packed, exact = make_weight(num_rows, num_inputs, form)
        weight, scale, zero = packed
        for num_tokens in (1, tiles.tokens, tiles.tokens + 1, 5 * tiles.tokens // 2):
            x = torch.randn(num_tokens, num_inputs, device="cuda").bfloat16()
            output, again = (
                packed_wide_linear(
                    x, weight, None, tiles, weight_scale=scale, weight_zero=zero, is_gated=is_gated,
                )
                for _ in range(2)
            )  # fmt: skip
            assert_rows_close(output, reference(x, exact, None, is_gated=is_gated))
            assert torch.equal(output, again)


@GATED
@pytest.mark.parametrize("num_tokens", [65, 80, 200, 300])
def test_rows_do_not_depend_on_each_other(num_tokens, is_gated):
    packed, _ = make_weight(8192, 1024, "128")
    x = torch.randn(num_tokens, 1024, device="cuda").bfloat16()
    output = packed_linear(x, *packed, None, is_gated)
    x[1:] = x[1:].flip(0) * 3
    assert torch.equal(packed_linear(x, *packed, None, is_gated)[0], output[0])
