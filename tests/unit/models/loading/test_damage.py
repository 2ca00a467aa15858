"""Every kind of damage ends in one clear error that names the file, and the tensor if it is one."""

import pytest
import torch

from models.config import ConfigError
from models.loading.checkpoint import CheckpointError
from models.loading.loader import load_model
from tests.support.damaged_checkpoints import DAMAGES, copy_checkpoint, split_in_two


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a checkpoint that the test may spoil."""
    return copy_checkpoint(checkpoint("llama")[0], tmp_path)


def load(folder):
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.timeout(20)
def test_damage_is_named(folder, damage):
    damage.apply(folder)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load(folder)
    message = str(caught.value)
    assert [part for part in damage.message if part not in message] == [], message


@pytest.mark.parametrize("is_split", [False, True])
def test_the_same_folder_loads_undamaged(folder, is_split):
    if is_split:
        split_in_two(folder)
    assert load(folder).config.architecture == "LlamaForCausalLM"
