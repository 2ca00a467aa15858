"""Checkpoints of models that see images, each made once."""

import pytest
import torch

from models.loading.loader import load_model
from tests.support.vision_variants import EVERY_VARIANT, VARIANTS, write_vision_checkpoint


@pytest.fixture(scope="session")
def vision_checkpoint(tmp_path_factory):
    """Returns a function from a variant's name to (folder, transformers' model), made once."""
    made = {}

    def get(variant: str):
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            made[variant] = folder, write_vision_checkpoint(folder, variant)
        return made[variant]

    return get


@pytest.fixture(params=EVERY_VARIANT)
def variant(request):
    return request.param


@pytest.fixture
def grids(variant):
    return VARIANTS[variant].grids


@pytest.fixture(scope="session")
def vision_pair(vision_checkpoint):
    """Returns a function from a variant's name to our model with its tower, and transformers'."""

    def get(variant: str):
        folder, reference = vision_checkpoint(variant)
        device = torch.device("cpu")
        model = load_model(folder, device=device, dtype=torch.float32, sees_images=True)
        return model, reference

    return get


@pytest.fixture
def seeing(vision_pair, variant):
    """Our model with its tower, and transformers'."""
    return vision_pair(variant)


@pytest.fixture(
    params=[
        "qwen3_vl", "qwen2_5_vl", "qwen3_5", pytest.param("hy_v4", marks=pytest.mark.families)
    ]
)  # fmt: skip
def sectioned(vision_pair, request):
    """Our model and transformers', where positions are those in time, height and width."""
    return vision_pair(request.param)
