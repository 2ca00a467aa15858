"""A worker compiles its encoder of images, or runs it as it is written."""

import pytest
import torch
from structlog.testing import capture_logs

from models.layers.vision_tower import TowerLayers
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.start.loaded_model import LoadedModel
from services.engine.worker.start.tower_compilation import compile_tower
from tests.support.vision_variants import write_vision_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("seeing")
    write_vision_checkpoint(folder, "qwen3_vl")
    return folder


def load(folder, cache, **flags):
    flags = {"compilation_level": 3, "use_inductor": False, **flags}
    sizes = {"num_kv_blocks": 64, "block_size": 4, "max_num_batched_tokens": 64}
    config = EngineConfig.from_flags(
        model=folder, device="cpu", compile_cache_dir=cache, **sizes, **flags
    )
    return LoadedModel.load(config)


@pytest.mark.parametrize("level", [2, 3])
def test_the_levels_that_compile_compile_all_layers(folder, tmp_path, level):
    loaded = load(folder, tmp_path, compilation_level=level)
    [(layers, code)] = compile_tower(loaded)
    assert isinstance(layers, TowerLayers)
    assert len(code) == len(layers) == loaded.model.config.vision.num_layers
    # The second time the trace is on disk.
    [(_, again)] = compile_tower(load(folder, tmp_path, compilation_level=level))
    assert len(again) == len(code)


@pytest.mark.parametrize(
    "flags",
    [
        {"compilation_level": 0},
        {"compilation_level": 1},
        {"enforce_eager": True},
        {"language_model_only": True},
    ],
)
def test_other_levels_and_models_of_text_compile_nothing(folder, tmp_path, flags):
    assert compile_tower(load(folder, tmp_path, **flags)) == []


def test_layers_that_cannot_be_traced_run_as_they_are_written(folder, tmp_path):
    loaded = load(folder, tmp_path)
    [layers] = [each for each in loaded.model.visual.modules() if isinstance(each, TowerLayers)]
    layers[0].forward = lambda hidden, rotation, bounds: hidden if bounds.max() > 3 else -hidden
    with capture_logs() as logs:
        assert compile_tower(loaded) == []
    assert [line["event"] for line in logs] == ["encoder_not_compiled"]
    assert not layers.are_replaced
