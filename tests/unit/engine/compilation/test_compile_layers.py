"""Layers of an encoder of images are traced and compiled once, and give the bits of eager."""

import pytest
import torch

from models.layers.vision_tower import TowerLayers
from models.loading.loader import load_model
from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.cache.cache_key import Factors
from services.engine.compilation.compile_layers import compile_layers
from services.engine.compilation.pieces.compiler_interface import EagerAdaptor
from services.engine.compilation.pieces.compiler_manager import CompilerManager
from services.engine.compilation.pieces.piece_compiler import PieceCompiler
from services.engine.compilation.trace import backend
from tests.support.compiled_models import CountingCompiler
from tests.support.image_prompts import random_picture
from tests.support.vision_variants import VARIANTS, write_vision_checkpoint

OTHERS = [
    "qwen2_5_vl", "qwen2_vl", "glm4v", "ministral3", "internvl", "gemma3_odd", "gemma4_odd",
    "llava_onevision_odd", "llava_next",
]  # fmt: skip
SHOWN = ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.families) for name in OTHERS)]


def load(folder, variant):
    write_vision_checkpoint(folder, variant)
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, sees_images=True)
    [layers] = [each for each in model.visual.modules() if isinstance(each, TowerLayers)]
    return model, layers


def encode(model, variant):
    pictures = [
        random_picture(model, grid, seed) for seed, grid in enumerate(VARIANTS[variant].grids)
    ]
    with torch.inference_mode():
        return [
            model.visual(torch.cat([each.patches for each in some]), [each.grid for each in some])
            for some in (pictures, pictures[:1])
        ]


@pytest.mark.parametrize("variant", SHOWN)
def test_one_piece_of_all_layers_gives_the_bits_of_eager(tmp_path, variant):
    model, layers = load(tmp_path, variant)
    eager = encode(model, variant)
    manager = CompilerManager(EagerAdaptor(), {})
    assert not layers.are_replaced
    layers.use(compile_layers(layers, PieceCompiler(manager), name="tower"))
    assert layers.are_replaced
    assert manager.stats.num_pieces == 1
    assert all(map(torch.equal, encode(model, variant), eager))


def test_new_weights_are_used_without_compiling_again(tmp_path):
    model, layers = load(tmp_path, "qwen3_vl")
    layers.use(compile_layers(layers, PieceCompiler(CompilerManager(EagerAdaptor(), {})), name="t"))
    before = encode(model, "qwen3_vl")
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(1.5)
    compiled = encode(model, "qwen3_vl")
    layers.use(list(layers))
    assert not any(map(torch.equal, compiled, before))
    assert all(map(torch.equal, compiled, encode(model, "qwen3_vl")))


def test_a_later_start_traces_and_compiles_nothing(tmp_path, monkeypatch):
    model, layers = load(tmp_path / "model", "qwen3_vl")
    eager = encode(model, "qwen3_vl")
    factors = Factors({"model": "qwen3_vl"})
    cache = ArtifactCache.open(tmp_path / "code", factors)

    def compiled():
        compiler = CountingCompiler()
        manager = CompilerManager(compiler, {}, cache=cache, factors=factors)
        layers.use(compile_layers(layers, PieceCompiler(manager), name="tower", cache=cache))
        assert all(map(torch.equal, encode(model, "qwen3_vl"), eager))
        return compiler.num_compiled, compiler.num_loaded

    assert compiled() == (1, 0)
    monkeypatch.setattr(backend, "trace_model", None)
    assert compiled() == (0, 1)
