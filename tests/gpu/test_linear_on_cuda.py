"""Products against float64 references: every dtype, odd shapes, and repeatability."""

import pytest
import torch

from models.kernels.tuning.tiles import MatrixTiles, VectorTiles, WideTiles
from models.layers.quantization import can_run_fp8
from models.ops.elementwise.rms_norm import add_rms_norm, rms_norm
from models.ops.products.linear import linear
from models.ops.products.linear_residual import linear_residual_norm, linear_residual_norm_linear
from models.ops.products.norm_linear import gated_linear, norm_linear
from tests.support.linear_case import OPTIONS, make_linear_case
from tests.support.tolerances import ROW_TOLERANCE, assert_rows_close

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ROW_TOLERANCE, ids=str)
WAYS = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
# Results and inputs of the products of Qwen3-0.6B, 4B, 8B, 14B, of gpt-oss-20b's router, and sizes
# that fit no tile.
SIZES = [
    (4096, 1024), (1024, 3072), (6144, 2560), (2560, 9728), (12288, 4096), (4096, 12288),
    (5120, 5120), (32, 2880), (1600, 1600), (99, 200), (7, 40),
]  # fmt: skip
ODD_SIZES = pytest.mark.parametrize("size", SIZES[-3:], ids=str)
ROUNDING_ERROR = 0.06
"""Of activations with four significant bits, relative to the norm; a gate adds to it."""
VECTOR = VectorTiles(rows=4, columns=256, num_warps=2)
WIDE = [
    WideTiles(groups=groups, tokens=tokens, slots=slots, splits=splits)
    for groups, tokens, slots, splits in [
        (1, 128, 7, 1), (2, 128, 6, 1), (3, 128, 5, 1), (2, 256, 4, 1), (3, 256, 3, 1),
        (1, 128, 7, 3), (2, 128, 6, 2), (1, 256, 5, 2),
    ]
]  # fmt: skip


def matrix_tiles(**sizes):
    return MatrixTiles(**{"tokens": 16, "rows": 64, "columns": 64, "num_stages": 3} | sizes)


@WAYS
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_the_references(size, options):
    for num_tokens in (1, 2, 3, 4, 5, 7, 15, 16, 17, 33, 65, 128, 200, 256, 512, 600, 1025):
        case = make_linear_case(num_tokens, *size, **options, device="cuda")
        assert_rows_close(case.run(), case.exact())


@WAYS
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("size", [*SIZES, (384, 416)], ids=str)
def test_fp8_weights_meet_unrounded_activations_of_one_token(size, scales, options):
    if not can_run_fp8(torch.device("cuda")):
        pytest.skip("this GPU has no FP8 products")
    case = make_linear_case(1, *size, **options, scales=scales, device="cuda")
    assert_rows_close(case.run(), case.exact())


@WAYS
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("size", [(6144, 2560), (1600, 1600), (384, 416), (1024, 3072)], ids=str)
def test_fp8_weights_meet_rounded_activations_of_more_tokens(size, scales, options):
    if not can_run_fp8(torch.device("cuda")):
        pytest.skip("this GPU has no FP8 products")
    for num_tokens in (2, 3, 8, 9, 31, 64, 65):
        case = make_linear_case(num_tokens, *size, **options, scales=scales, device="cuda")
        exact = case.exact()
        assert (case.run() - exact).norm() < ROUNDING_ERROR * exact.norm()


@DTYPES
@WAYS
@ODD_SIZES
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_scalar_products_take_any_dtype(num_tokens, size, options, dtype):
    case = make_linear_case(num_tokens, *size, **options, dtype=dtype, device="cuda")
    if not (case.is_gated and case.bias is not None):
        assert_rows_close(case.run_vector(VECTOR), case.exact())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["plain", "bias", "gate"])
@ODD_SIZES
@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
def test_tensor_cores_take_any_size(tokens, size, way, dtype):
    tiles = matrix_tiles(tokens=tokens, columns=max(64, 2048 // tokens))
    for num_tokens in (3, tokens):
        case = make_linear_case(num_tokens, *size, **OPTIONS[way], dtype=dtype, device="cuda")
        assert_rows_close(case.run_matrix(tiles), case.exact())


@pytest.mark.parametrize("way", ["plain", "bias"])
@ODD_SIZES
@pytest.mark.parametrize(("splits", "rows"), [(2, 64), (3, 128), (8, 64)])
def test_tensor_cores_leave_parts(splits, rows, size, way):
    for num_tokens in (3, 16):
        case = make_linear_case(num_tokens, *size, **OPTIONS[way], device="cuda")
        tiles = matrix_tiles(splits=splits, rows=rows, columns=128)
        assert_rows_close(case.run_matrix(tiles), case.exact())


@pytest.mark.parametrize("way", ["plain", "gate"])
@pytest.mark.parametrize("size", [(1600, 1600), (104, 200), (8, 40)], ids=str)
@pytest.mark.parametrize("tiles", WIDE, ids=str)
def test_tiles_of_many_tokens_take_any_size(tiles, way, size):
    for num_tokens in (1, 100, 128, 300, 1111):
        case = make_linear_case(num_tokens, *size, **OPTIONS[way], device="cuda")
        if not case.is_gated or tiles.splits == 1:
            assert_rows_close(case.run_wide(tiles), case.exact())


@WAYS
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 16, 32, 128, 512])
def test_results_repeat_bit_for_bit_and_rows_do_not_depend_on_each_other(num_tokens, options):
    case = make_linear_case(num_tokens, 1024, 3072, **options, device="cuda")
    output = case.run()
    for _ in range(5):
        assert torch.equal(case.run(), output)
    case.x[1:] = case.x[1:].flip(0) * 3
    if case.residual is not None:
        case.residual[1:] = 0
    assert torch.equal(case.run()[0], output[0])


@pytest.mark.parametrize("num_tokens", [1, 16, 128])
def test_few_tokens_of_bfloat16_are_not_left_to_torch(num_tokens, monkeypatch):
    x = torch.randn(num_tokens, 1024, device="cuda").bfloat16()
    weight = torch.randn(4096, 1024, device="cuda").bfloat16()
    expected = gated_linear(x, weight, None)

    def fail(*arguments):
        raise AssertionError("torch was asked")

    monkeypatch.setattr(torch.nn.functional, "linear", fail)
    assert torch.equal(gated_linear(x, weight, None), expected)
    with pytest.raises(AssertionError):
        linear(x.float(), weight.float(), None)


@DTYPES
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_a_norm_sums_up_the_parts_of_a_product(num_parts, dtype):
    parts = torch.randn(num_parts, 7, 192, device="cuda")
    residual, weight = torch.randn(8, 192, device="cuda").to(dtype).split((7, 1))
    total = parts.double().sum(0) + residual.double()
    normed = add_rms_norm(parts, residual, weight[0], 1e-6)
    assert_rows_close(residual, total)
    exact = residual.cpu().double()
    assert_rows_close(normed, rms_norm(exact, weight[0].cpu().double(), 1e-6))


class Chain:
    """Feed-forward layers, one after the other, each reading what the one before wrote."""

    def __init__(self, num_layers):
        def draw(outputs, inputs):
            return (torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).bfloat16()

        self.norm = torch.ones(1024, device="cuda").bfloat16(), 1e-6
        self.layers = [(draw(2 * 3072, 1024), draw(1024, 3072)) for _ in range(num_layers)]

    def run(self, x, after=lambda: None):
        stream = x.clone()
        gated = norm_linear(stream, *self.norm, self.layers[0][0], None, True)
        after()
        ends = zip(self.layers[:-1], self.layers[1:], strict=True)
        for (_, down), (up, _) in ends:
            gated = linear_residual_norm_linear(
                stream, gated, down, None, *self.norm, up, None, True
            )
            after()
        return linear_residual_norm(stream, gated, self.layers[-1][1], None, *self.norm)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 32, 100, 128, 256, 600])
def test_overlapping_launches_of_a_captured_chain_wait_for_each_other(num_tokens):
    chain = Chain(num_layers=12)
    x = torch.randn(num_tokens, 1024, device="cuda").bfloat16()
    chain.run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = chain.run(x)
    for _ in range(10):
        x.normal_()
        expected = chain.run(x, after=torch.cuda.synchronize)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, expected)
