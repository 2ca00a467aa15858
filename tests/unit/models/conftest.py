"""Model tests run on one thread: two busy threads are slower than one for small tensors."""

import pytest
import torch

from models.config import ModelConfig
from tests.support.random_checkpoints import write_checkpoint


@pytest.fixture(autouse=True, scope="session")
def _single_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Returns a function from a variant's name to (folder, transformers' model), made once."""
    made = {}

    def get(variant: str):
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            made[variant] = folder, write_checkpoint(folder, variant)
        return made[variant]

    return get


@pytest.fixture
def llama_config(checkpoint) -> ModelConfig:
    return ModelConfig.from_folder(checkpoint("llama")[0])
