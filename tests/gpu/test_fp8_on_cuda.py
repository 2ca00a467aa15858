"""FP8 products and loading on a GPU: against float64, against the CPU, and replayed in a graph."""

import pytest
import torch
from safetensors.torch import load_file

from models.kernels.tuning.tiles import NarrowFP8Tiles, WideFP8Tiles
from models.layers.quantization import FP8_BLOCKS, FP8_ROWS, can_run_fp8
from models.loading.loader import load_model
from models.loading.staging import CHUNK_BYTES, PinnedStaging
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.products import fp8_linear
from models.ops.products.feed_forward import feed_forward
from models.ops.products.linear import linear
from models.ops.products.linear_residual import linear_residual_norm, linear_residual_norm_linear
from models.ops.products.norm_linear import gated_linear, norm_linear
from tests.support.damaged_checkpoints import split_in_two
from tests.support.quantized_checkpoints import BLOCK, FP8, KINDS, WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.tolerances import assert_rows_close

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PRODUCT_ERROR = 0.05
"""Largest error from rounding activations to four significant bits, relative to the norm."""
SHAPES = [(1, 4096, 4096), (7, 7168, 1536), (33, 2048, 576), (64, 512, 129), (100, 200, 256)]
SHAPES += [(127, 1536, 384), (300, 4096, 1024)]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(autouse=True)
def _hopper():
    if not can_run_fp8(CUDA):
        pytest.skip("this GPU has no FP8 products")


def case(num_rows, size, num_columns, dtype, *, is_blocked):
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, size, device=CUDA).to(dtype)
    weight = torch.randn(num_columns, size, device=CUDA).to(FP8)
    grid = (-(-num_columns // BLOCK), -(-size // BLOCK)) if is_blocked else (num_columns, 1)
    return x, weight, torch.rand(grid, device=CUDA) + 0.5


def exact_weight(weight, scale):
    if scale.shape[1] > 1 or scale.shape[0] != weight.shape[0]:
        scale = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
        scale = scale.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return weight.double() * scale.double()


def exact_x(x, group_size):
    """Returns x as the kernels round it before they multiply."""
    from models.kernels.products.fp8.fp8_linear import quantize

    rounded, scale = quantize(x, group_size)
    return rounded.double() * scale.double().repeat_interleave(group_size, 1)[:, : x.shape[1]]


@DTYPES
@pytest.mark.parametrize("size", [128, 200, 2048, 7168, 28672])
@pytest.mark.parametrize("is_by_block", [True, False])
def test_rounding_is_the_references(size, dtype, is_by_block):
    from models.kernels.products.fp8.fp8_linear import quantize

    x = torch.randn(5, size, device=CUDA).to(dtype)
    x[1] = 0
    group_size = BLOCK if is_by_block else size
    rounded, scale = quantize(x, group_size)
    expected, expected_scale = fp8_linear.quantize(x, group_size)
    torch.testing.assert_close(scale, expected_scale)
    # A division may round otherwise in the last bit, and then a value in its last of three; values
    # below 2**-6 are multiples of 2**-9.
    difference = (rounded.float() - expected.float()).abs()
    assert (difference <= (expected.float().abs() / 8).clamp(min=2**-9)).all()
    assert (difference > 0).float().mean() < 0.01


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_block_product_is_that_of_the_rounded_activations(shape, dtype, has_bias):
    x, weight, scale = case(*shape, dtype, is_blocked=True)
    bias = torch.randn(shape[2], device=CUDA).to(dtype) if has_bias else None
    output = fp8_linear.rounded_product(x, weight, bias, scale)
    added = 0 if bias is None else bias.double()
    weights = exact_weight(weight, scale)
    expected = exact_x(x, BLOCK) @ weights.t() + added
    # Tensor cores add FP8 products in fewer than 24 bits.
    assert ((output - expected).norm() / expected.norm()) < 2e-3
    exact = x.double() @ weights.t() + added
    assert ((output - exact).norm() / exact.norm()) < PRODUCT_ERROR


@DTYPES
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[1] % 16 == s[2] % 16 == 0], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_row_product_is_near_that_of_the_rounded_activations(shape, dtype, has_bias):
    x, weight, scale = case(*shape, dtype, is_blocked=False)
    bias = torch.randn(shape[2], device=CUDA).to(dtype) if has_bias else None
    output = fp8_linear.rounded_product(x, weight, bias, scale)
    assert output.dtype == dtype
    expected = exact_x(x, shape[1]) @ exact_weight(weight, scale).t()
    expected = expected if bias is None else expected + bias.double()
    # The library's product comes in bfloat16.
    assert_rows_close(output.to(torch.bfloat16), expected)


@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 16, 100])
def test_products_replay_in_a_graph(num_tokens, is_blocked):
    x, weight, scale = case(num_tokens, 1024, 512, torch.bfloat16, is_blocked=is_blocked)
    linear(x, weight, None, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = linear(x, weight, None, scale)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(output, linear(x, weight, None, scale))


def test_staging_copies_any_size_and_shape():
    staging = PinnedStaging(CUDA)
    for shape in ((), (0, 4), (3,), (CHUNK_BYTES // 2,), (CHUNK_BYTES // 4 + 1, 13)):
        values = torch.randn(shape).to(torch.bfloat16)
        assert torch.equal(staging(values).cpu(), values)
    scales = torch.rand(1, 1).expand(100, 1)
    assert torch.equal(staging(scales).cpu(), scales)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    write_checkpoint(folder, "llama", **WIDE)
    return folder


def assert_same_parameters(folder, **options):
    models = [
        load_model(folder, device=device, dtype=torch.bfloat16, **options)
        for device in (CUDA, torch.device("cpu"))
    ]
    others = dict(models[1].named_parameters())
    for name, param in models[0].named_parameters():
        assert param.device.type == "cuda"
        assert param.dtype == others[name].dtype
        assert torch.equal(param.cpu().float(), others[name].float()), name


def test_loading_gives_the_same_parameters_as_on_the_cpu(wide, tmp_path):
    assert_same_parameters(wide)
    for file in wide.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    split_in_two(tmp_path)
    assert_same_parameters(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep_quantized", [True, False])
def test_quantised_loading_gives_the_same_parameters_as_on_the_cpu(
    wide, tmp_path, kind, keep_quantized
):
    quantize_checkpoint(wide, tmp_path, kind)
    assert_same_parameters(tmp_path, keep_quantized=keep_quantized)


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_linears_are_kept_by_default(wide, tmp_path, kind):
    plain = quantize_checkpoint(wide, tmp_path, kind)
    model = load_model(tmp_path, device=CUDA, dtype=torch.bfloat16)
    down = model.model.layers[0].mlp.down_proj
    assert down.method is (FP8_BLOCKS if KINDS[kind][0] == "block" else FP8_ROWS)
    x = torch.randn(9, WIDE["intermediate_size"], device=CUDA).to(torch.bfloat16)
    exact = x.double() @ plain["model.layers.0.mlp.down_proj.weight"].to(CUDA).double().t()
    assert ((down(x) - exact).norm() / exact.norm()) < PRODUCT_ERROR
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(
        down.weight.cpu().float(), stored["model.layers.0.mlp.down_proj.weight"].float()
    )


@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize("size", [256, 1600, 4096])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_norm_rounds_to_the_bits_of_a_launch_of_its_own(size, is_blocked, num_parts):
    from models.kernels.elementwise import rms_norm as norms
    from models.kernels.products.fp8.fp8_linear import quantize

    x = torch.randn(num_parts, 9, size, device=CUDA)
    residual, weight = torch.randn(10, size, device=CUDA).bfloat16().split((9, 1))
    first, second = residual.clone(), residual.clone()
    rounded = norms.add_rounded_rms_norm(x, first, weight[0], 1e-6, is_blocked=is_blocked)
    # The sum of parts is rounded as the product's own launch rounds it.
    added = x[0] if num_parts == 1 else (x[0] + x[1] + x[2]).bfloat16()
    normed = norms.add_rms_norm(added, second, weight[0], 1e-6, rounds=False)
    expected = quantize(normed, BLOCK if is_blocked else size)
    assert torch.equal(first, second)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(rounded, expected, strict=True))


@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize("size", [96, 1408, 2048, 12288])
def test_a_gate_rounds_to_the_bits_of_a_launch_of_its_own(size, is_blocked):
    from models.kernels.elementwise import silu_and_mul as gates
    from models.kernels.products.fp8.fp8_linear import quantize

    x = torch.randn(9, 2 * size, device=CUDA).bfloat16()
    rounded = gates.rounded_silu_and_mul(x, is_blocked=is_blocked)
    expected = quantize(gates.silu_and_mul(x), BLOCK if is_blocked else size)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(rounded, expected, strict=True))


@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("num_tokens", [2, 9, 32, 64, 200])
def test_fused_operators_are_the_unfused(num_tokens, is_blocked, is_gated):
    x, weight, scale = case(num_tokens, 1024, 512, torch.bfloat16, is_blocked=is_blocked)
    norm_weight = torch.randn(1024, device=CUDA).bfloat16()
    normed = rms_norm(x, norm_weight, 1e-6)
    expected = (gated_linear if is_gated else linear)(normed, weight, None, scale)
    output = norm_linear(x, norm_weight, 1e-6, weight, None, is_gated, scale)
    assert torch.equal(output, expected)


MANY = [(65, 4096, 256), (100, 528, 384), (127, 12288, 640), (128, 1024, 200), (300, 128, 1024)]
MANY += [(1000, 2048, 1152)]
# The last tile's groups begin before the ends of others; the copy engine needs every fourth token.
MANY += [(count, 640, 384) for count in (66, 129, 130, 131, 132, 133, 135, 193, 255, 257, 383, 385)]


@pytest.mark.parametrize("shape", MANY, ids=str)
@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize(("rows", "products"), [(64, 1), (128, 1), (128, 2)])
@pytest.mark.parametrize("splits", [1, 3])
def test_every_tile_of_many_tokens_gives_the_product(shape, is_blocked, rows, products, splits):
    tiles = WideFP8Tiles(rows=rows, products=products, slots=4, splits=splits)
    assert_tiles_give_the_product(shape, tiles, is_blocked=is_blocked)


FEW = [(2, 4096, 256), (8, 528, 384), (13, 12288, 640), (32, 1024, 200), (64, 128, 1024)]


@pytest.mark.parametrize("shape", FEW, ids=str)
@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize(("groups", "programs"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("splits", [1, 3])
def test_every_tile_of_few_tokens_gives_the_product(shape, is_blocked, groups, programs, splits):
    tokens = max(8, 1 << (shape[0] - 1).bit_length())
    tiles = NarrowFP8Tiles(
        tokens=tokens, groups=groups, programs=programs, slots=3, splits=splits
    )  # fmt: skip
    assert_tiles_give_the_product(shape, tiles, is_blocked=is_blocked)


def assert_tiles_give_the_product(shape, tiles, *, is_blocked):
    from models.kernels.products.fp8.rounded_linear import rounded_linear

    x, weight, scale = case(*shape, torch.bfloat16, is_blocked=is_blocked)
    bias = torch.randn(shape[2], device=CUDA).bfloat16()
    rounded = fp8_linear.rounded_for(x, weight, scale)
    output = rounded_linear(*rounded, weight, scale, bias, tiles, torch.bfloat16)
    output = output.double().sum(0) if tiles.splits > 1 else output
    group_size = BLOCK if is_blocked else shape[1]
    expected = exact_x(x, group_size) @ exact_weight(weight, scale).t() + bias.double()
    assert ((output - expected).norm() / expected.norm()) < 3e-3


@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize("size", [(4096, 1024), (528, 384)], ids=str)
def test_a_tokens_unsplit_product_is_the_same_bits_for_any_number_of_tokens(size, is_blocked):
    x, weight, scale = case(700, *size, torch.bfloat16, is_blocked=is_blocked)
    expected = fp8_linear.rounded_product(x, weight, None, scale)
    for num_tokens in (1, 2, 8, 9, 31, 64, 65, 67, 128, 129, 130, 131, 193, 255, 257, 513):
        output = fp8_linear.rounded_product(x[:num_tokens], weight, None, scale)
        assert torch.equal(output, expected[:num_tokens]), num_tokens


@pytest.mark.parametrize("num_tokens", [2, 8, 30, 64, 65, 129, 130, 131, 193, 255, 257, 1001])
@pytest.mark.parametrize("size", [(4096, 256), (528, 1408)], ids=str)
def test_a_gated_product_rounds_to_the_bits_of_a_launch_of_its_own(num_tokens, size):
    from models.kernels.products.fp8.fp8_linear import quantize

    num_inputs, num_outputs = size
    x, weight, scale = case(
        num_tokens, num_inputs, 2 * num_outputs, torch.bfloat16, is_blocked=True
    )
    operands = (*fp8_linear.rounded_for(x / num_inputs, weight, scale), weight, scale)
    rounded = fp8_linear.rounded_gated_product(*operands, None, x.dtype, is_blocked=True)
    gated = fp8_linear.gated_product_of_rounded(*operands, None, x.dtype)
    expected = quantize(gated, BLOCK)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(rounded, expected, strict=True))


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [(2, 4096, 512), (20, 528, 1408), (65, 4096, 512), (129, 1024, 256), (700, 528, 1408)],
    ids=str,
)
@pytest.mark.parametrize("is_blocked", [True, False])
def test_a_gated_product_is_its_halves(shape, dtype, is_blocked):
    x, weight, scale = case(*shape, dtype, is_blocked=is_blocked)
    output = gated_linear(x / shape[1], weight, None, scale)
    product = exact_x(x / shape[1], BLOCK if is_blocked else shape[1])
    gate, up = (product @ exact_weight(weight, scale).t()).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert output.dtype == dtype
    assert ((output - expected).norm() / expected.norm()) < 4e-3


@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize("has_next", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 40, 200])
def test_a_feed_forward_layer_is_its_products(num_tokens, has_next, is_blocked):
    dtype = torch.bfloat16
    x, out, out_scale = case(num_tokens, 512, 1024, dtype, is_blocked=is_blocked)
    _, gate_up, gate_up_scale = case(1, 1024, 1536, dtype, is_blocked=is_blocked)
    _, down, down_scale = case(1, 768, 1024, dtype, is_blocked=is_blocked)
    following = case(1, 1024, 640, dtype, is_blocked=is_blocked)[1:] if has_next else (None, None)
    norm = torch.randn(1024, device=CUDA).to(dtype)
    residual = torch.randn(num_tokens, 1024, device=CUDA).to(dtype)
    stream = residual.clone()
    output = feed_forward(
        stream, x, out, None, norm, 1e-6, gate_up, None, down, None, norm, 1e-6,
        following[0], None, False, out_scale, gate_up_scale, down_scale, following[1],
    )  # fmt: skip
    inner = linear_residual_norm_linear(
        residual, x, out, None, norm, 1e-6, gate_up, None, True, out_scale, gate_up_scale
    )
    product = (residual, inner, down, None, norm, 1e-6)
    if has_next:
        weight, scale = following
        expected = linear_residual_norm_linear(*product, weight, None, False, down_scale, scale)
    else:
        expected = linear_residual_norm(*product, down_scale)
    assert torch.equal(output, expected)
    assert torch.equal(stream, residual)
