"""The encoder of images on a GPU: attention's kernel, graphs with padding, and compiled layers."""

import pytest
import torch
import transformers
from torch.nn import functional

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.layers.vision_tower import TowerLayers
from models.loading.loader import load_model
from models.ops.attention.segment_attention import segment_attention
from models.ops.elementwise.layer_norm import add_layer_norm, layer_norm
from models.ops.elementwise.turn_heads import turn_heads
from models.ops.products.gelu_linear import gelu_linear
from services.engine.batch import EncodedImage, pack_int32
from services.engine.compilation.compile_layers import compile_layers
from services.engine.compilation.pieces.compiler_manager import CompilerManager
from services.engine.compilation.pieces.inductor_adaptor import InductorStandaloneAdaptor
from services.engine.compilation.pieces.piece_compiler import PieceCompiler
from services.engine.config.images import PAGE_VECTORS
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.image_prompts import random_picture
from tests.support.segments import bounds_of, reference
from tests.support.vision_variants import VARIANTS, write_vision_checkpoint

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
FAMILIES = [
    "qwen3_vl", "qwen3_vl_odd", "qwen2_5_vl", "glm4v", "ministral3", "internvl", "gemma3_odd",
    "gemma4", "llava_onevision_odd", "llava_next",
]  # fmt: skip
LENGTHS = [
    [1], [64], [4096], [1000, 24, 3000], [64] * 20 + [32, 16] * 5, [127, 129, 1, 2048, 64, 64, 3],
]  # fmt: skip


def assert_close(actual, expected, dtype):
    assert actual.shape == expected.shape
    error = (actual.float() - expected.float()).abs().max()
    assert error <= TOLERANCES[dtype] * expected.float().abs().max()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 24, 64, 72, 80, 128])
def test_attention_within_segments(dtype, head_dim):
    for lengths in LENGTHS:
        torch.manual_seed(head_dim)
        heads = torch.randn(sum(lengths), 6, head_dim, device="cuda").to(dtype)
        q, k, v = heads[:, :2], heads[:, 2:4].contiguous(), heads[:, 4:]
        bounds = bounds_of(lengths, "cuda")
        actual = segment_attention(q, k, v, bounds, head_dim**-0.5)
        assert_close(actual, reference(q, k, v, bounds, head_dim**-0.5), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_norms_rotations_and_activations_of_layers(dtype):
    torch.manual_seed(0)
    x, residual = torch.randn(2, 301, 1152, device="cuda").to(dtype)
    weight, bias = torch.randn(2, 1152, device="cuda").to(dtype)
    total, normed = add_layer_norm(x, residual, weight, bias, 1e-6)
    assert_close(total, x + residual, dtype)
    expected = functional.layer_norm(total.float(), (1152,), weight.float(), bias.float(), 1e-6)
    assert_close(normed, expected, dtype)
    assert_close(layer_norm(total, weight, bias, 1e-6), expected, dtype)
    heads, angles = torch.randn(301, 48, 72, device="cuda").to(dtype), x.new_empty(301, 72).float()
    rotation = torch.stack((angles.uniform_().cos(), angles.sin()), dim=1)
    first, second = heads[:, :32].float().chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    expected = heads[:, :32].float() * rotation[:, None, 0] + swapped * rotation[:, None, 1]
    assert_close(turn_heads(heads[:, :32], rotation), expected, dtype)
    factor, offset = torch.randn(4304, 1152, device="cuda").to(dtype) / 34, x.new_ones(4304)
    expected = functional.linear(x.float(), factor.float(), offset.float())
    expected = functional.gelu(expected, approximate="tanh")
    assert_close(gelu_linear(x, factor, offset), expected, dtype)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    row = VARIANTS[request.param]
    if not hasattr(transformers, f"{row.name}ForConditionalGeneration"):
        pytest.skip(f"transformers {transformers.__version__} cannot write {row.name}")
    folder = tmp_path_factory.mktemp(request.param)
    write_vision_checkpoint(folder, request.param)
    return folder, row.grids


def encoded_images(model, grids, seed=0):
    """Images of noise for the encoder, each in pages of its own."""
    images, first = [], 0
    for number, grid in enumerate(grids):
        picture = random_picture(model, grid, seed + number)
        count = -(-model.visual.num_vectors(grid) // PAGE_VECTORS)
        pages = pack_int32(range(first, first + count))
        first += count
        patches = picture.patches.numpy().tobytes()
        images.append(EncodedImage(patches=patches, grid=grid, pages=pages))
    return images


def vectors(engine, images):
    """The table's rows of images, after they were encoded together."""
    inputs, tower = engine.runner.forward.images, engine.model.visual
    inputs.rows.zero_()
    with torch.inference_mode():
        run = engine.runner.encoder.encode(images)
    counts = [tower.num_vectors(tuple(each.grid)) for each in images]
    slots = [inputs.slots(each, count) for each, count in zip(images, counts, strict=True)]
    return run, inputs.rows[torch.cat(slots)].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_encode_what_the_encoder_does_without_them(family, dtype):
    folder, grids = family
    sizes = {"num_encoder_pages": 64, "max_model_len": 256, "num_blocks": 100}
    sizes |= {"device": "cuda", "dtype": dtype}
    model = load_model(folder, device=torch.device("cuda"), dtype=dtype, sees_images=True)
    unit = model.config.vision.patch_unit
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL,
        cudagraph_capture_sizes=[2],
        cudagraph_encoder_sizes=[8 * unit, 20 * unit, 60 * unit, 200 * unit],
    )
    engine = GraphEngine(folder, config, model=model, **sizes)
    outcomes = [each for each in engine.capture() if each.key.kind is GraphKind.ENCODER]
    assert len(outcomes) == 4
    assert not [each.fault for each in outcomes if each.fault]
    eager = GraphEngine(folder, compilation_config(), model=model, **sizes)
    for seed, shown in enumerate((grids[:1], grids, grids[::-1], [*grids, *grids], grids[-1:])):
        images = encoded_images(model, shown, seed)
        run, actual = vectors(engine, images)
        assert run.HasField("graph_key")
        without, expected = vectors(eager, images)
        assert not without.HasField("graph_key")
        assert_close(actual, expected, dtype)
        assert expected.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_layers_encode_what_written_ones_do(family, dtype):
    folder, grids = family
    model = load_model(folder, device=torch.device("cuda"), dtype=dtype, sees_images=True)
    tower = model.visual
    shown = [grids[:1], grids]
    batches = [[random_picture(model, grid, seed) for seed, grid in enumerate(g)] for g in shown]

    def encode(pictures):
        patches = torch.cat([each.patches for each in pictures]).cuda()
        with torch.inference_mode():
            return tower(patches, [each.grid for each in pictures])

    expected = [encode(pictures) for pictures in batches]
    manager = CompilerManager(InductorStandaloneAdaptor(), {})
    for layers in [each for each in tower.modules() if isinstance(each, TowerLayers)]:
        layers.use(compile_layers(layers, PieceCompiler(manager), name="tower"))
    assert manager.stats.num_pieces == 1
    for pictures, each in zip(batches, expected, strict=True):
        assert_close(encode(pictures), each, dtype)
