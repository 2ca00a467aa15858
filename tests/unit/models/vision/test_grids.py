"""The host knows, without torch, how many patches and vectors an image has."""

import pytest

from models.config import ModelConfig
from tests.support.vision_variants import write_vision_checkpoint


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    configs = {}
    for name in ("qwen3_vl", "internvl", "llava_onevision"):
        folder = tmp_path_factory.mktemp(name)
        write_vision_checkpoint(folder, name)
        configs[name] = ModelConfig.from_folder(folder, sees_images=True).vision
    return configs


@pytest.mark.parametrize(
    ("name", "grid", "num_patches", "num_vectors"),
    [
        ("qwen3_vl", (4, 6), 24, 6),
        ("internvl", (3, 4, 4), 48, 12),
        ("llava_onevision", (1, 4, 4, 99, 7), 16, 17),
        # Two tiles side by side: 4 x 8 vectors, of which padding takes a row at each end.
        ("llava_onevision", (3, 4, 4, 8, 30), 48, 16 + 2 * (8 + 1)),
    ],
)
def test_images_have_patches_and_vectors(configs, name, grid, num_patches, num_vectors):
    config = configs[name]
    config.check_grid(grid)
    assert config.num_patches(grid) == num_patches
    assert config.num_vectors(grid) == num_vectors


@pytest.mark.parametrize(
    ("name", "grid", "message"),
    [
        ("qwen3_vl", (4, 5), "multiples of 2"),
        ("qwen3_vl", (0, 4), "2 numbers from 1"),
        ("qwen3_vl", (2**17, 4), "2 numbers from 1"),
        ("qwen3_vl", (1, 4, 4), "2 numbers from 1"),
        ("internvl", (4, 4), "3 numbers from 1"),
        ("internvl", (0, 4, 4), "3 numbers from 1"),
        ("internvl", (2, 2, 8), "4 x 4 patches"),
        ("llava_onevision", (1, 4, 4), "5 numbers from 1"),
        ("llava_onevision", (1, 4, 4, 0, 5), "5 numbers from 1"),
        ("llava_onevision", (4, 4, 4, 15, 13), "has 1 tiles and an overview"),
    ],
)
def test_grids_that_no_image_has_are_refused(configs, name, grid, message):
    with pytest.raises(ValueError, match=message):
        configs[name].check_grid(grid)


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl", "llava_onevision"])
@pytest.mark.parametrize("max_vectors", [40, 77])
def test_the_largest_image_fits(configs, name, max_vectors):
    config = configs[name]
    grid = config.largest_grid(max_vectors)
    config.check_grid(grid)
    assert 0 < config.num_vectors(grid) <= max_vectors
